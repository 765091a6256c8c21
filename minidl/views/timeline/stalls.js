// Stalls: the long waits of the loops, one after the other.

const LONG = 20e6, TIMES = 3, FEW = 5;  // a stall is longer than 20 ms and than 3 times the median wait of its loop, if that has so many
let stallsKnown = {};

function waitsOf(slot) {  // a loop's outermost calls of next
  const mine = runs.filter(run => lanes[run.lane].slot === slot && lanes[run.lane].kind === "loader");
  for (const run of mine.sort((a, b) => a.row - b.row)) {
    const found = [];
    for (let i = run.first; i < run.first + run.count; i++) if (kindOf(i).name === "next") found.push(i);
    if (found.length) return found;
  }
  return [];
}

function stalls() {  // bars, by time; and the longest wait, for a trace without stalls
  if (stallsKnown.key === built) return stallsKnown;
  const took = i => end[i] - begin[i], all = shownSlots().map(waitsOf);
  const long = all.flatMap(waits => {
    const usual = waits.length < FEW ? 0 : quantile(Float64Array.from(waits, took).sort(), .5), limit = Math.max(LONG, TIMES * usual);
    return waits.filter(i => took(i) > limit || faded(i));  // one that did not end is a stall, however short the recording
  });
  return stallsKnown = {key: built, long: long.sort((a, b) => begin[a] - begin[b]), waits: all.flat().sort((a, b) => took(b) - took(a)), fetches: longestOf("fetch"), samples: longestOf("sample")};
}

function longestOf(name) {  // of each batch, its longest step of that name
  const found = new Map();
  for (let i = 0; i < begin.length; i++) {
    if (kindOf(i).name !== name) continue;
    const batch = num("bar.batch", i), best = found.get(batch);
    if (batch >= 0 && !(end[best] - begin[best] >= end[i] - begin[i])) found.set(batch, i);
  }
  return found;
}

function wantedIn(i) {  // the task that the innermost wait in this call of next needed, -1 if none says so
  for (const run of runs) if (lanes[run.lane] === laneOf(bar(i))) {
    let found = -1;
    eachIn(run, begin[i], end[i], at => { if (kindOf(at).stage === "wait" && num("bar.wanted", at) >= 0) found = num("bar.wanted", at); });
    if (found >= 0) return found;
  }
  return -1;
}

function batchOf(i, task) {  // of a call of next; of one that brought nothing, the latest batch of the task that it needed
  const batch = num("bar.batch", i);
  if (batch >= 0 || task < 0) return batch;
  const loader = num("bar.loader", i);
  return [...stalls().fetches].findLast(([sent, at]) => num("bar.task", at) === task && num("bar.loader", at) === loader && num("batch.put", sent) < end[i])?.[0] ?? -1;
}

function slowestWithin(i) {  // the slowest sample that the loop itself fetched in this call of next
  let found;
  for (const run of runs) if (lanes[run.lane] === laneOf(bar(i)))
    eachIn(run, begin[i], end[i], at => { if (kindOf(at).name === "sample" && !(end[found] - begin[found] >= end[at] - begin[at])) found = at; });
  return found;
}

function neededIn(i) {  // of a call of next: the task that it waited for, -1 = unknown; the step that worked on it, its slowest sample
  const came = num("bar.task", i), task = came >= 0 ? came : wantedIn(i), {fetches, samples} = stalls();
  const batch = batchOf(i, task), work = fetches.get(batch);
  return {task, worker: work === undefined ? -1 : num("bar.worker", work), sample: samples.get(batch) ?? slowestWithin(i)};
}

const tookInWords = i => faded(i) ? words.fates[col["bar.fate"][i]] : duration(end[i] - begin[i]);
const loopOf = i => words.slots.length > 1 ? `${words.slots[laneOf(bar(i)).slot]}: ` : "";
const waitedOf = i => duration(Math.min(end[i], words.last) - begin[i]);

function waitInWords(i) {
  const {task, worker, sample} = neededIn(i), parts = [];
  if (worker >= 0) parts.push(`worker ${worker}`);
  if (sample !== undefined) parts.push(`slowest sample ${num("bar.number", sample)}: ${tookInWords(sample)}`);
  return `${loopOf(i)}next() ${col["bar.fate"][i] ? "has waited" : "waited"} ${waitedOf(i)}${task >= 0 ? ` for task ${task}` : ""}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

const FIRST = 4;  // stalls that the panel lists
function aboutStalls() {
  const {long} = stalls();
  if (!long.length) return [];
  const list = picks("stalls", long.slice(0, FIRST).map((i, n) => {
    const {task, worker} = neededIn(i);
    return [waitedOf(i), `${loopOf(i)}stall ${n + 1} at ${duration(begin[i])}`, [task >= 0 ? `task ${task}` : "", worker >= 0 ? `worker ${worker}` : ""].filter(Boolean).join(", "), () => toStall(i)];
  }));
  return [make("h3", "stalls of the loop"),
    make("p", long.length === 1 ? "1 long call of next(). N goes to it." : `${long.length.toLocaleString("en")} long calls of next(), the first ones; N goes on.`), list];
}

function toStall(i) {
  const {long} = stalls();
  frame(bar(i));
  say(`stall ${long.indexOf(i) + 1} of ${long.length}: ${waitInWords(i)}`);
}

function goStall(by) {
  const {long, waits} = stalls();
  if (!waits.length) return say("There is no call of next() in this trace.");
  if (!long.length) { frame(bar(waits[0])); return say(`no stall: none of ${waits.length} calls of next() took more than 20 ms and 3 times the median; the longest: ${waitInWords(waits[0])}`); }
  const t = chosen ? timesOf(chosen)[0] : by > 0 ? -Infinity : Infinity;
  const later = long.filter(i => begin[i] > t), earlier = long.filter(i => begin[i] < t);
  toStall(by > 0 ? later[0] ?? long[0] : earlier[earlier.length - 1] ?? long[long.length - 1]);
}
