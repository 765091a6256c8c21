"""The rules of the doctor: each names one kind of cause from the end of a chain, and says what would speak against it.

Interface: `table.judged(case, chain)` -> `judgement.Judgement` of the first of `table.RULES` that applies. Pure.

A rule is written from a cause, not from a case: it looks at what a thread is blocked in (of the kernel and of Python),
and not at which test program that might be. To add one, write a function in the module of its kind, and put it into
the table before those that it is more special than. A rule may rely on the rows before it: what they name does not
reach it. A rule that sees what speaks against its cause returns None, or says `helped`.
"""
