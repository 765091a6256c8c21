// Searching: by what is written in a bar, by number, name, duration, epoch, rank.

const SAME_AS = {task: "task", batch: "task", worker: "worker", sample: "sample", iterator: "loader", loader: "loader", epoch: "epoch", rank: "rank",
  t: "task", s: "sample", w: "worker", e: "epoch", r: "rank"};
const NS_IN = {ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9, min: 60e9};

function parse(text) {
  const wanted = {words: [], more: 0, less: Infinity}, isNumber = token => /^\d+$/.test(token ?? "");
  const rest = text.toLowerCase().replace(/([<>])=?\s*([\d.]+)\s*(ns|us|µs|ms|min|s)?(?![a-z])/g, (_, sign, value, unit) => {
    wanted[sign === ">" ? "more" : "less"] = Number(value) * NS_IN[unit || "ms"];
    wanted.timed = true;
    return " ";
  });
  const tokens = rest.split(/[\s:=]+/).filter(token => token && token !== "for").flatMap(token => token.match(/^[tswer]\d+$/) ? [token[0], token.slice(1)] : [token]);
  for (let i = 0; i < tokens.length; i++) {
    const [key, value, after] = tokens.slice(i);
    if (SAME_AS[key] && isNumber(value)) { wanted[SAME_AS[key]] = Number(value); i++; }
    else if (isNumber(key) && SAME_AS[value] && !isNumber(after)) { wanted[SAME_AS[value]] = Number(key); i++; }
    else if (isNumber(key)) wanted.task = Number(key);
    else if (key === "open") wanted.open = true;
    else if (key === "error" || key === "alarm") wanted.alarm = true;
    else wanted.words.push(key);
  }
  const given = Object.keys(wanted).filter(key => !["words", "more", "less"].includes(key));
  if (!wanted.words.length && given.join() === "epoch") wanted.words.push("epoch");  // the epoch itself, not all in it
  return wanted;
}

function codesNamed({words: parts, timed}) {  // the kinds of this very name, or else those whose name contains each word
  const all = Object.keys(kinds).map(Number), exact = all.filter(code => [kinds[code].label, kinds[code].name].includes(parts.join(" ")));
  const named = code => parts.every(part => kinds[code].name.includes(part) || kinds[code].label.includes(part));
  return new Set(exact.length ? exact : all.filter(code => named(code) && !(timed && !parts.length && kinds[code].name === "epoch")));
}

function epochsBy(number) {  // when each iterator had its epoch of that number
  const found = [];
  for (const run of runs) for (let i = run.first; i < run.first + run.count; i++)
    if (kindOf(i).name === "epoch" && num("bar.number", i) === number) found.push({loader: num("bar.loader", i), from: begin[i], until: end[i]});
  return found;
}

function search(text) {
  const wanted = parse(text), out = [];
  if (text.trim()) {
    const codes = codesNamed(wanted);
    const epochs = wanted.epoch === undefined ? [] : epochsBy(wanted.epoch);
    const inEpoch = (prefix, i, t) => {
      const batch = num(`${prefix}.batch`, i), loader = num(`${prefix}.loader`, i);
      return batch >= 0 ? num("batch.epoch", batch) === wanted.epoch : epochs.some(one => one.loader === loader && one.from <= t && t < one.until);
    };
    const fits = (prefix, i, t) => codes.has(col[`${prefix}.code`][i])
      && ["task", "worker", "loader"].every(name => wanted[name] === undefined || num(`${prefix}.${name}`, i) === wanted[name])
      && (wanted.epoch === undefined || inEpoch(prefix, i, t));
    if (!wanted.alarm) for (let i = 0; i < begin.length; i++) {
      const took = end[i] - begin[i];
      if (took >= wanted.more && took <= wanted.less && fits("bar", i, begin[i]) && (!wanted.open || faded(i))
        && (wanted.sample === undefined || (kindOf(i).name === "sample" && num("bar.number", i) === wanted.sample))) out.push(bar(i));
    }
    if (wanted.sample === undefined && !wanted.open && !wanted.timed) for (let i = 0; i < marks.length; i++)
      if (fits("mark", i, marks[i]) && (!wanted.alarm || col["mark.alarm"][i])) out.push(mark(i));
  }
  if (wanted.open) return openBars().filter(what => out.some(one => same(one, what)));
  // Who asks for a task looks for the work on it: the waits that brought it come last. Who asks for a duration, for the longest.
  const last = what => wanted.task !== undefined && !wanted.words.length && !worked(what);
  const size = what => wanted.more ? timesOf(what)[0] - timesOf(what)[1] : 0;
  const ranked = what => wanted.rank === undefined || new RegExp(`rank ${wanted.rank}\\b`).test(words.slots[laneOf(what).slot]);
  return out.filter(what => !laneOf(what).out && ranked(what)).sort((a, b) => last(a) - last(b) || size(a) - size(b) || timesOf(a)[0] - timesOf(b)[0]);
}

function worked(what) {  // not a wait, nor what waits lie in
  const {stage, name} = kinds[valueOf(what, "code")];
  return !["idle", "wait"].includes(stage) && !["epoch", "next"].includes(name);
}

const openBars = () => words.unended.map(bar).filter(what => !laneOf(what).out);  // what is to blame first

function find(text) {
  matches = search(text);
  const work = matches.findIndex(what => isBar(what) && !kindOf(what.at).soft);
  matchAt = (parse(text).timed ? 0 : Math.max(0, work)) - 1;  // work before waits, but not if durations are asked for
  $("back").disabled = $("on").disabled = !matches.length;
  $("found").textContent = !text.trim() ? "" : matches.length ? `${matches.length.toLocaleString("en")} found` : "none found";
  redraw();
}

function go(by) {
  if (!matches.length) return;
  matchAt = (matchAt + by + matches.length) % matches.length;
  $("found").textContent = `${(matchAt + 1).toLocaleString("en")} of ${matches.length.toLocaleString("en")}`;
  frame(matches[matchAt]);
}

$("on").addEventListener("click", () => go(1));
$("back").addEventListener("click", () => go(-1));
$("query").addEventListener("input", () => find($("query").value));
$("query").addEventListener("keydown", event => {
  if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") { $("query").value = ""; find(""); canvas.focus(); }
});
