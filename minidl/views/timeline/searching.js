// Searching.

const SAME_AS = {task: "task", batch: "task", worker: "worker", sample: "sample", iterator: "loader", loader: "loader"};

function parse(text) {
  const wanted = {words: []}, tokens = text.trim().toLowerCase().split(/[\s:=]+/).filter(Boolean);
  for (let i = 0; i < tokens.length; i++) {
    const [key, value] = [tokens[i], tokens[i + 1]];
    if (SAME_AS[key] && /^\d+$/.test(value ?? "")) { wanted[SAME_AS[key]] = Number(value); i++; }
    else if (/^\d+$/.test(key)) wanted.task = Number(key);
    else if (key === "open") wanted.open = true;
    else if (key === "error" || key === "alarm") wanted.alarm = true;
    else wanted.words.push(key);
  }
  return wanted;
}

function search(text) {
  const wanted = parse(text), out = [];
  if (text.trim()) {
    const named = code => { const k = kinds[code]; return wanted.words.every(w => k.name.includes(w) || k.label.includes(w)); };
    const codes = new Set(Object.keys(kinds).map(Number).filter(named));
    const fits = (prefix, i) => codes.has(col[`${prefix}.code`][i])
      && ["task", "worker", "loader"].every(name => wanted[name] === undefined || num(`${prefix}.${name}`, i) === wanted[name]);
    if (!wanted.alarm) for (let i = 0; i < begin.length; i++) {
      if (fits("bar", i) && (!wanted.open || faded(i))
        && (wanted.sample === undefined || (kindOf(i).name === "sample" && num("bar.number", i) === wanted.sample))) out.push(bar(i));
    }
    if (wanted.sample === undefined && !wanted.open) for (let i = 0; i < marks.length; i++)
      if (fits("mark", i) && (!wanted.alarm || col["mark.alarm"][i])) out.push(mark(i));
  }
  // Who asks for a task looks for the work on it: the waits that brought it come last.
  const last = what => wanted.task !== undefined && !wanted.words.length && !worked(what);
  if (wanted.open) return openBars().filter(what => out.some(one => same(one, what)));
  return out.filter(what => !laneOf(what).hidden).sort((a, b) => last(a) - last(b) || timesOf(a)[0] - timesOf(b)[0]);
}

function worked(what) {  // not a wait, nor what waits lie in
  const {stage, name} = kinds[valueOf(what, "code")];
  return !["idle", "wait"].includes(stage) && !["epoch", "next"].includes(name);
}

const openBars = () => words.unended.map(bar).filter(what => !laneOf(what).hidden);  // what is to blame first

function find(text) {
  matches = search(text);
  matchAt = Math.max(0, matches.findIndex(what => isBar(what) && !kindOf(what.at).soft)) - 1;  // work before waits
  $("back").disabled = $("on").disabled = !matches.length;
  $("found").textContent = !text.trim() ? "" : matches.length ? `${matches.length.toLocaleString("en")} found` : "none found";
  redraw();
}

function go(by) {
  if (!matches.length) return;
  matchAt = (matchAt + by + matches.length) % matches.length;
  $("found").textContent = `${matchAt + 1} of ${matches.length.toLocaleString("en")}`;
  frame(matches[matchAt]);
}

$("on").addEventListener("click", () => go(1));
$("back").addEventListener("click", () => go(-1));
$("query").addEventListener("input", () => find($("query").value));
$("query").addEventListener("keydown", event => {
  if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") { $("query").value = ""; find(""); canvas.focus(); }
});
