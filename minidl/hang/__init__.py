"""Why a loader hangs: the cause in one sentence, with its evidence, its certainty, alternatives, and the fix.

Interface: `diagnose.diagnose(looks, told)` -> `finding.Finding`, from evidence of processes and from a trace's wait;
`headline.headline(trace)` -> `Finding`, from a recorded run. `doctor.examine(target)`, at the top, looks at a running
one. They work for torch's loader and for minidl's. In reading order:

evidence/   what the kernel shows of processes: a reader for each file of /proc, plain values, the wait of each thread
places      the step of a loader that a thread is in, by its stack
case        one case: the role of each process, and all that is known of a thread (`ThreadFacts`)
chain       whom a thread waits for (the table `STEPS`), from the loop to the end of the chain
rules/      the cause, from the end of the chain (`table.RULES`)
outcomes    whether that is a hang (the table `OUTCOMES`)
sentence    the chain in words; `diagnose` joins all of them
finding     the result of everything here; `remedies` and `limits` hold its advice and how long is long
snapshot    a run at one moment, from its events; `live` and `recent` follow a run
headline/   the cause in a recorded run (the table `CAUSES`); `consult` finds the evidence of its waits
life        whether a process is there; `job`: the ranks beside it

Rules of use: it changes nothing in the processes that it looks at. It knows causes and no cases, and prefers "unknown"
to a guess: see `rules`.
"""
