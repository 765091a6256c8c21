"""Why a loader hangs: the cause in one sentence, with its evidence, its certainty, alternatives, and the fix.

Interface: `diagnose.diagnose(looks, told)` -> `finding.Finding`, from evidence of processes and from a trace. It works
for torch's loader and for minidl's, also without a trace. `places` says where in a loader a thread is, `chain` follows
the waits from the loop to their end, `rules` name the cause.

Rules of use: pure. It knows causes and no cases, and prefers "unknown" to a guess: see `rules`.
"""
