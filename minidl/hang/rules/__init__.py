"""The rules of the doctor: each names one kind of cause from the end of a chain, and the counter-evidence.

Interface: `table.judged(chain)` -> `judgement.Judgement` of the first of `table.RULES` that applies. Pure.

A rule describes a cause, not a case: it looks at the call that blocks a thread (in the kernel and in Python), and not
at which test program that might be. To add a rule, write a function in the module of its kind, and put it into the
table before the more general rules. A rule may rely on the rows before it: it never sees a chain that they name. A rule
that finds evidence against its cause returns None, or sets `helped`.
"""
