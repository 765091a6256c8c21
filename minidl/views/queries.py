"""Questions about a trace in SQL, for the Perfetto UI: `QUERIES`, by the names that `minidl view --query` takes.

Each is a PerfettoSQL query on the file that `perfetto` writes. Its first column is named after the question, since
the UI's tab has no title of its own. If a row is about a slice, its last columns are the slice's `id`, `ts`, `dur` and
`track_id`: a click on the id then goes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Query:
    """A question in words, and in SQL."""

    about: str
    sql: str


_LANES = """
with lane as (
  select t.id as track_id, t.name as thread,
    iif(p.name glob 'loader*' or p.name glob 'worker*', p.name, t.name) as process,
    iif(t.name glob 'rank *', t.name, iif(p.name glob 'rank *', p.name, iif(g.name glob 'rank *', g.name, ''))) as rank
  from track t left join track p on p.id = t.parent_id left join track g on g.id = p.parent_id
)"""
"""A lane that is folded under the lane of a process is of that process."""

_SLICES = f"""{_LANES},
s as (
  select slice.id, ts, dur, track_id, slice.name, slice.arg_set_id,
    max(0, iif(dur < 0, trace_end() - ts, dur)) as took, process, thread, rank
  from slice join lane using (track_id)
)"""


def _arg(name: str, of: str = "arg_set_id") -> str:
    return f"extract_arg({of}, 'debug.{name}')"


def _of(name: str) -> str:
    return _arg(name, "slice.arg_set_id")


_ITERATOR = f"ifnull({_arg('iterator')}, 1)"

QUERIES: Final = {
    "waits": Query(
        "how long the training loop waited for each batch, the longest first",
        f"""{_SLICES}
select took / 1e6 as "waited for the batch, ms", {_arg("task", "s.arg_set_id")} as task,
  {_arg("worker", "y.arg_set_id")} as worker, {_arg("outcome", "s.arg_set_id")} as outcome, rank, process,
  ifnull({_arg("iterator", "s.arg_set_id")}, 1) as iterator,
  s.ts / 1e6 as "at, ms", s.id, s.ts, s.dur, s.track_id
from s left join slice y on y.parent_id = s.id and y.name = 'yield'
where s.name glob 'next*' order by took desc limit 100""",
    ),
    "samples": Query(
        "the samples that took longest, with their worker and index",
        f"""{_SLICES}
select took / 1e6 as "the sample took, ms", {_arg("cpu_ms")} as "of it computing, ms",
  {_arg("index")} as "index", {_arg("position")} as position,
  {_arg("task")} as task, {_arg("worker")} as worker, rank, process, name, id, ts, dur, track_id
from s where name glob 'sample*' and name not glob 'sampler*' order by took desc limit 100""",
    ),
    "stages": Query(
        "shares of time that each worker and its feeder spent on each step, without the steps inside it",
        f"""{_SLICES},
own as (
  select ifnull({_arg("step", "s.arg_set_id")}, s.name) as name,
    s.rank, s.process, s.thread, s.took - ifnull((select sum(iif(c.dur < 0, trace_end() - c.ts, c.dur))
    from slice c where c.parent_id = s.id), 0) as took, s.ts, s.ts + s.took as till
  from s where s.process glob 'worker*'
),
life as (select rank, process, max(till) - min(ts) as ns from own group by rank, process)
select own.process as "share of a worker's time", own.rank, own.thread, own.name, count() as times,
  round(100.0 * sum(took) / life.ns, 1) as "%", sum(took) / 1e6 as ms
from own join life using (rank, process) group by own.rank, own.process, own.thread, own.name
order by own.rank, own.process, sum(took) desc""",
    ),
    "blocked": Query(
        "batches before their turn: the time of each in the reorder buffer, and the task that it waited for",
        f"""{_SLICES},
seen as (
  select id, ts, name, {_ITERATOR} as iterator, {_arg("task")} as task, {_arg("worker")} as worker,
    {_arg("rcvd_idx")} as behind, track_id, rank, process
  from s where name in ('reorder_store', 'yield')
),
after as (select *, lead(ts) over (partition by rank, process, iterator, task order by ts) as yielded from seen)
select (ifnull(yielded, trace_end()) - ts) / 1e6 as "in the reorder buffer, ms", task, worker,
  behind as "first awaited task", iif(yielded is null, 'never yielded', '') as note, rank, process, iterator,
  ts / 1e6 as "from, ms", id, ts, 0 as dur, track_id
from after where name = 'reorder_store' order by ifnull(yielded, trace_end()) - ts desc limit 100""",
    ),
    "open": Query(
        "steps that did not end, the innermost last",
        f"""{_SLICES}
select took / 1e6 as "did not end, for ms", rank, process, thread, name,
  ifnull({_arg("task")}, {_arg("awaited task")}) as task,
  ifnull({_arg("worker")}, {_arg("awaited worker")}) as worker, {_arg("index")} as "index", id, ts, dur, track_id
from s where dur < 0 or name glob '* (did not end)' order by rank, process, thread, ts""",
    ),
    "alarms": Query(
        "errors, timeouts, deaths and signals",
        f"""{_LANES}
select slice.ts / 1e6 as "failed at, ms", slice.name, rank, process, {_of("task")} as task,
  {_of("worker")} as worker, {_of("index")} as "index", {_of("text")} as text, {_of("exit_code")} as "exit code",
  {_of("signal")} as signal, slice.id, slice.ts, slice.dur, slice.track_id
from slice join lane using (track_id)
where slice.name in ('task_error', 'timed_out', 'found_dead', 'terminate')
  or (slice.name = 'worker_gone' and {_of("exit_code")} != 0)
order by slice.ts""",
    ),
}
"""By name."""
