"""Why a loader hangs: the cause in one sentence, with its evidence, how sure it is, what else fits, and the fix.

Interface: `diagnose.diagnose(looks, told)` -> `finding.Finding`, from evidence of processes and from what a trace
tells. It runs on torch's loader and on ours, and needs no trace. `places` says where in a loader a thread is, `chain`
follows the waiting from the loop to its end, `rules` name the cause of that end.

Rules of use: pure. It knows causes and no cases, and prefers "don't know" to a guess: see `rules`.
"""
