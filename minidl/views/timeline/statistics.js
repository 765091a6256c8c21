// What the panel says of the selected range: the loop's time, batches, steps, workers.

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

function eachIn(run, from, until, act) {  // act(index, ns of it in the range)
  const last = run.first + run.count;
  for (let i = run.first + firstAfter(run.until, 0, run.count, from); i < last && begin[i] < until; i++)
    if (end[i] > from) act(i, Math.min(end[i], until, words.last) - Math.max(begin[i], from));
}

function stepsIn(from, until) {  // of each kind of step: its whole durations, sorted, and its time in the range
  const found = new Map();
  for (const run of runs) if (!lanes[run.lane].out) eachIn(run, from, until, (i, inside) => {
    const code = col["bar.code"][i];
    if (!found.has(code)) found.set(code, {code, took: [], inside: 0, count: 0});
    const one = found.get(code);
    one.count++; one.inside += inside;
    if (!col["bar.fate"][i]) one.took.push(end[i] - begin[i]);  // how long others took is not known
  });
  for (const one of found.values()) one.took = Float64Array.from(one.took).sort();
  return [...found.values()].sort((a, b) => b.inside - a.inside);
}

function timeOf(slot, names, from, until) {  // of the loader's and the program's steps of these names, none twice
  const pieces = [];
  for (const run of runs) if (lanes[run.lane].slot === slot && ["loader", "consumer"].includes(lanes[run.lane].kind))
    eachIn(run, from, until, (i, inside) => { if (names.includes(kindOf(i).name)) pieces.push([Math.max(begin[i], from), inside]); });
  let total = 0, last = -Infinity;
  for (const [at, size] of pieces.sort((a, b) => a[0] - b[0])) {
    total += Math.max(0, at + size - Math.max(at, last));
    last = Math.max(last, at + size);
  }
  return total;
}

const NEXT = ["next"], AROUND = ["next", "worker_start", "shutdown"];
function loopIn(slot, from, until) {
  const next = timeOf(slot, NEXT, from, until), waits = timeOf(slot, AROUND, from, until), step = timeOf(slot, ["consumer"], from, until);
  return [["training step", step, "consumer"], ["waiting in next()", next, "next"], ["starting and ending workers", waits - next, "worker_start"],
    ["the rest of the program", Math.max(0, until - from - step - waits), ""]];
}

function busyIn(lane, from, until) {  // share of the range in which the worker of a lane had work
  let busy = 0;
  for (const run of runs) if (lanes[run.lane] === lane && run.row === 0)
    eachIn(run, from, until, (i, inside) => { if (!kindOf(i).waits) busy += inside; });
  return busy / (until - from);
}

function batchesIn(slot, from, until) {  // that the loop has got
  let count = 0;
  for (const run of markRuns) if (lanes[run.lane].slot === slot)
    for (let i = firstAfter(marks, run.first, run.count, from - 1); i < run.first + run.count && marks[i] <= until; i++)
      if (kinds[col["mark.code"][i]].name === "yield") count++;
  return count;
}

const rate = value => value < 99.5 ? value.toPrecision(3) : Math.round(value).toLocaleString("en");

function stepName(code) {  // the label, if it names no other kind of step
  const {label, name} = kinds[code];
  return Object.values(kinds).some(kind => kind.label === label && kind.name !== name) ? name.replaceAll("_", " ") : label;
}

function meter(share, colour) {
  const full = styled("span", "meter", null, styled("span", "part", ""));
  full.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  full.firstChild.style.background = colour || look.counter;
  return full;
}

const colourNamed = name => Object.values(kinds).find(kind => kind.name === name)?.colour;

function grid(head, rows) {  // cells are texts, or elements
  const line = (tag, cells) => make("tr", null, ...cells.map((cell, n) =>
    styled(tag, n ? "number" : "", cell instanceof Element ? null : cell, ...(cell instanceof Element ? [cell] : []))));
  return styled("table", "grid", null, ...(head ? [line("th", head)] : []), ...rows.map(row => line("td", row)));
}

function tookBy(lane, name, from, until) {  // sorted durations of a worker's whole steps of that name
  const took = [];
  for (const run of runs) if (lanes[run.lane] === lane)
    eachIn(run, from, until, i => { if (kindOf(i).name === name && !col["bar.fate"][i]) took.push(end[i] - begin[i]); });
  return Float64Array.from(took).sort();
}

const BUSIEST = 8, IDLEST = 4, UNEVEN = 2;  // listed of many workers; so many times the median of the workers stands out
function aboutWorkers(from, until) {
  const all = lanes.filter(lane => lane.kind === "worker" && !lane.out).map(lane => {
    const samples = tookBy(lane, "sample", from, until);
    return {lane, busy: busyIn(lane, from, until), batches: tookBy(lane, "fetch", from, until).length, sample: samples.length ? quantile(samples, .5) : 0};
  });
  if (!all.length) return [];
  all.sort((a, b) => b.busy - a.busy);
  const usual = name => quantile(Float64Array.from(all, one => one[name]).sort(), .5), usually = {batches: usual("batches"), sample: usual("sample")};
  const cell = (one, name, text) => make(all.length > 2 && one[name] > UNEVEN * usually[name] ? "b" : "span", text);
  const line = one => [words.slots.length > 1 ? `${words.slots[one.lane.slot]}, ${one.lane.title}` : one.lane.title, meter(one.busy, actorColour(one.lane.actor)),
    percent(one.busy), cell(one, "batches", one.batches.toLocaleString("en")), cell(one, "sample", one.sample ? duration(one.sample) : "")];
  const between = all.length - BUSIEST - IDLEST, rows = between > 0
    ? [...all.slice(0, BUSIEST).map(line), [`${between} others`, "", "", "", ""], ...all.slice(-IDLEST).map(line)] : all.map(line);
  return [make("h3", all.length > 1 ? "workers, the busiest first" : "the worker"), grid(["", "", "busy", "batches", "median sample"], rows),
    ...(all.length > 2 ? [styled("p", "faint", "bold: more than twice the median of the workers.")] : [])];
}

function aboutRange() {
  const [from, until] = rangeOf(), size = until - from;
  if (size <= 0) return [make("h2", "Nothing is selected"), make("p", "Move the range's end with shift and the arrow keys.")];
  const slots = words.slots.map((title, slot) => ({title, slot, is: shownSlots().includes(slot)})).filter(one => one.is);
  const about = [make("h2", `Range of ${duration(size)}`), make("p", `${moment(from)} to ${moment(until)}`),
    styled("div", "row", null, button("zoom in", zoomToRange), button("clear", clearRange), ...(framed ? [] : [button("save this part", savePart)]))];
  for (const {title, slot} of slots) {
    const count = batchesIn(slot, from, until);
    about.push(make("h3", slots.length > 1 ? `the loop of ${title}` : "the loop"),
      grid(null, loopIn(slot, from, until).filter(([, time]) => time > 0).map(([what, time, name]) => [what, meter(time / size, colourNamed(name)), duration(time), percent(time / size)])),
      make("p", `${count.toLocaleString("en")} batch${count === 1 ? "" : "es"}${count ? `: ${rate(count * 1e9 / size)} per second` : ""}`));
  }
  const steps = stepsIn(from, until).filter(({code}) => kinds[code].name !== "epoch");
  about.push(make("h3", "steps"), grid(["", "count", "total", "p50", "p95", "max"], steps.map(({code, count, inside, took}) => [
    make("span", null, swatch(kinds[code]), ` ${stepName(code)}`), count.toLocaleString("en"), duration(inside),
    ...(took.length ? [quantile(took, .5), quantile(took, .95), took[took.length - 1]].map(duration) : ["", "", ""])])),
    styled("p", "faint", "total: the time within the range. p50, p95 and max: of whole steps that touch it."));
  return [...about, ...aboutWorkers(from, until), ...aboutSlowest(), make("h3", "this part as a page"), make("code", commandOfPart())];
}
