// The slowest steps of a kind: their list, a histogram of all, and keys that go from one to the next.

const LISTED = 12, KEPT = 200;  // shown in the panel; reached by key
let slowKind = "", slowKnown = {};

function kindsOfSteps() {  // codes of the steps that there are, what a reader looks for first
  const first = ["sample", "fetch", "next"];
  const place = code => (first.indexOf(kinds[code].name) + first.length + 1) % (first.length + 1);
  return [...new Set(col["bar.code"])].filter(code => kinds[code].name !== "epoch").sort((a, b) => place(a) - place(b) || a - b);
}

function slowOf() {  // the steps of the chosen kind in the range, or in the trace: durations, sorted, and the slowest bars
  const codes = kindsOfSteps();
  if (!codes.some(code => kinds[code].name === slowKind)) slowKind = codes.length ? kinds[codes[0]].name : "";
  const [from, until] = range ? rangeOf() : [words.begin, words.end], key = [slowKind, from, until, built].join();
  if (slowKnown.key === key) return slowKnown;
  const all = [], took = [];
  for (const run of runs) if (!lanes[run.lane].out) eachIn(run, from, until, i => {
    if (kindOf(i).name === slowKind && !col["bar.fate"][i]) { all.push(i); took.push(end[i] - begin[i]); }
  });
  const sorted = Float64Array.from(took).sort(), least = sorted[Math.max(0, sorted.length - KEPT)];
  const slow = all.filter((_, n) => took[n] >= least).sort((a, b) => end[b] - begin[b] - end[a] + begin[a]).slice(0, KEPT);
  return slowKnown = {key, sorted, slow};
}

function histogram(sorted, bins = 32) {  // both axes are logarithmic: a few outliers among thousands are seen
  const low = Math.log(Math.max(1, sorted[0])), size = Math.max(1e-9, Math.log(Math.max(1, sorted[sorted.length - 1])) - low) / bins;
  const counts = new Array(bins).fill(0);
  for (const ns of sorted) counts[Math.max(0, Math.min(bins - 1, Math.floor((Math.log(Math.max(1, ns)) - low) / size)))]++;
  const most = Math.log1p(Math.max(...counts));
  const columns = counts.map((count, n) => {
    const column = styled("span", "column", "");
    column.style.height = count ? `${Math.max(6, 100 * Math.log1p(count) / most)}%` : "0";
    column.title = `${count.toLocaleString("en")} took ${duration(Math.exp(low + n * size))} to ${duration(Math.exp(low + (n + 1) * size))}`;
    return column;
  });
  const labels = [`${duration(sorted[0])}`, `median ${duration(quantile(sorted, .5))}`, `${duration(sorted[sorted.length - 1])}`];
  return make("div", null, styled("div", "histogram", null, ...columns), styled("div", "under", null, ...labels.map(text => make("span", text))));
}

function outliers(sorted) {
  const limit = 5 * quantile(sorted, .5), first = firstAfter(sorted, 0, sorted.length, limit), count = sorted.length - first;
  if (!count) return `None of ${sorted.length.toLocaleString("en")} took more than 5 times the median.`;
  const total = sorted.reduce((a, b) => a + b, 0), theirs = sorted.subarray(first).reduce((a, b) => a + b, 0);
  return `${count.toLocaleString("en")} of ${sorted.length.toLocaleString("en")} took more than 5 times the median: ${percent(theirs / total)} of the time of all.`;
}

function aboutSlowest() {
  if (!begin.length) return [];
  const {sorted, slow} = slowOf(), choice = make("select");
  for (const name of new Set(kindsOfSteps().map(code => kinds[code].name))) {
    const item = make("option", stepName(Object.keys(kinds).find(code => kinds[code].name === name)));
    item.value = name; item.selected = name === slowKind;
    choice.append(item);
  }
  choice.ariaLabel = "which kind of step to list";
  choice.addEventListener("change", () => { slowKind = choice.value; details(); });
  const title = [make("h3", range ? "the slowest steps in the range" : "the slowest steps"), styled("div", "row", null, choice)];
  if (!sorted.length) return [...title, make("p", "None ended here.")];
  const list = picks("slowest", slow.slice(0, LISTED).map((i, n) => [duration(end[i] - begin[i]), caption(i)[0], whereIs(i), () => goSlow(n)]));
  return [...title, histogram(sorted), make("p", outliers(sorted)), list];
}

const whereIs = i => [  // words.slots: "A · iterator 1" of two traces, "rank 0 · iterator 1"
  words.slots.length > 1 ? words.slots[laneOf(bar(i)).slot].split(" · ")[0] : "",
  num("bar.task", i) >= 0 && kindOf(i).letter !== "t" ? `task ${num("bar.task", i)}` : "", laneOf(bar(i)).title].filter(Boolean).join(", ");

function picks(name, rows) {  // a list to choose from by pointer or keys; of each row: how long, what, where, what a choice does
  const list = styled("ol", `picks ${name}`, null, ...rows.map(([took, what, where, act]) => {
    const made = button("", act);
    made.append(make("b", took), make("span", what), styled("span", "faint", where));
    return make("li", null, made);
  }));
  list.addEventListener("keydown", event => {
    const by = {ArrowDown: 1, ArrowUp: -1}[event.key], all = [...list.querySelectorAll("button")];
    if (by) { event.preventDefault(); all[all.indexOf(document.activeElement) + by]?.focus(); }
  });
  return list;
}

function goSlow(n) {
  const {slow, sorted} = slowOf();
  if (!slow.length) return say("No step ended here.");
  n = (n + slow.length) % slow.length;
  const i = slow[n], label = stepName(col["bar.code"][i]);
  frame(bar(i));
  say(`slowest ${label} ${n + 1} of ${sorted.length.toLocaleString("en")}: ${caption(i)[0]} took ${duration(end[i] - begin[i])} on ${laneOf(bar(i)).title}; the median is ${duration(quantile(sorted, .5))}`);
}

function nextSlow(by) {
  const at = chosen && isBar(chosen) ? slowOf().slow.indexOf(chosen.at) : -1;
  goSlow(at < 0 && by < 0 ? -1 : at + by);
}
