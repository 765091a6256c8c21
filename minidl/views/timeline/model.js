// The model: bars, marks, batches and counters from the columns; what can be selected; captions.

let built = 0;  // changes with what is counted: the bars, and which lanes are shown
let begin, end, marks, alarmMarks, runs, markRuns, kept, stopsOf, counters, lanes, kinds, fading;

function build() {
  ({lanes, kinds} = words);
  fading = new Set(words.fading);
  lanes.forEach(lane => { lane.at = lane.top; lane.full = lane.heights; });
  arrange();
  [alarmMarks, runs, markRuns] = [[], [], []];
  begin = added(col["bar.begin"]);
  end = new Float64Array(begin.length);
  for (let i = 0; i < end.length; i++) end[i] = begin[i] + Number(col["bar.took"][i]);
  marks = added(col["mark.time"]);
  for (const [lane, level, first, count] of words.runs) {
    // The latest end so far: from the first one after the window's begin on, bars can be visible.
    const until = new Float64Array(count);
    for (let i = 0, last = -Infinity; i < count; i++) until[i] = last = Math.max(last, end[first + i]);
    runs.push({lane, row: level, first, count, until});
  }
  for (const [lane, first, count] of words.markRuns) markRuns.push({lane, first, count});
  kept = {
    bar: {runs, first: runs.map(run => run.first), begin, end},
    mark: {runs: markRuns, first: markRuns.map(run => run.first), begin: marks, end: marks},
  };
  col["mark.alarm"].forEach((is, i) => { if (is) alarmMarks.push(i); });
  stopsOf = new Int32Array(col["batch.put"].length + 1).fill(0);
  for (const batch of col["stop.batch"]) stopsOf[Number(batch) + 1]++;
  for (let i = 1; i < stopsOf.length; i++) stopsOf[i] += stopsOf[i - 1];
  counters = words.counters.map((about, i) => {
    const values = Float64Array.from(col[`counter.${i}.value`], Number);
    return {...about, times: added(col[`counter.${i}.time`]), values, most: values.reduce((a, b) => Math.max(a, b), 0)};
  });
}

const num = (name, i) => Number(col[name][i]);
const kindOf = i => kinds[col["bar.code"][i]];
const faded = i => fading.has(col["bar.fate"][i]);

// What can be selected is a {type, at}: the bar or the mark with the index `at`.
const bar = at => ({type: "bar", at}), mark = at => ({type: "mark", at});
const isBar = what => what.type === "bar";
const valueOf = (what, name) => num(`${what.type}.${name}`, what.at);
const timesOf = ({type, at}) => [kept[type].begin[at], kept[type].end[at]];
function runOf({type, at}) { const {runs, first} = kept[type]; return runs[firstAfter(first, 0, runs.length, at) - 1]; }
const laneOf = what => lanes[runOf(what).lane];
const same = (a, b) => a === b || (a && b && a.type === b.type && a.at === b.at);

function caption(i) {
  const kind = kindOf(i), n = num("bar.number", i);
  let label = kind.label;
  if (kind.begin[0]?.unit === "string") label = words.texts[num("bar.bx", i)] || label;
  if (kind.name === "epoch" && words.ownEpochs.includes(num("bar.loader", i))) label = `iterator ${col["bar.loader"][i]} epoch`;
  return n >= 0 ? [`${label}${kind.before} ${n}`, `${kind.letter}${n}`] : [label, ""];
}
