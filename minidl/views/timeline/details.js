// The panel: details of what is selected, or about the trace; the list of keys.

function heading(what) {
  const {name} = kinds[valueOf(what, "code")], full = isBar(what) ? caption(what.at)[0] : name;
  return full.startsWith(name) ? full : `${full} (${name})`;
}

const who = what => ["task", "worker"].map(name => [name, valueOf(what, name)]).filter(([, value]) => value >= 0);

function rowsOf(what) {
  if (isBar(what)) return barRows(what.at);
  const kind = kinds[valueOf(what, "code")];
  return [...who(what), ...kind.begin.map((field, n) => [field.name, fieldText(field, col[`mark.${"xyz"[n]}`][what.at])])];
}

function barRows(i) {
  const kind = kindOf(i), fate = col["bar.fate"][i], rows = [];
  const known = num("bar.known", i);
  rows.push(["took", fate ? `${words.fates[fate]}${known ? `; ${duration(known)} up to the last that is known` : ""}` : duration(end[i] - begin[i])]);
  for (const [name, ns] of [["computing", num("bar.cpu", i)], ["ready, without a CPU", num("bar.cpu_wait", i)]])
    if (ns) rows.push([name, `${duration(ns)} (${percent(ns / (end[i] - begin[i]))})`]);
  if (kind.stage === "wait") {
    const wanted = num("bar.wanted", i);
    if (wanted >= 0) rows.push(["needed", `task ${wanted}`]);
    if (!fate && num("bar.task", i) >= 0) rows.push(["came", `task ${num("bar.task", i)} of worker ${num("bar.worker", i)}`]);
  } else rows.push(...who(bar(i)));
  const values = new Map();
  kind.begin.forEach((field, n) => values.set(field.name, fieldText(field, col[`bar.b${"xyz"[n]}`][i])));
  if (!words.timeouts.includes(num("bar.loader", i))) values.delete("timeout");  // of a poll, which the user has not set
  if (!fate) kind.end.forEach((field, n) => values.set(field.name, fieldText(field, col[`bar.e${"xyz"[n]}`][i])));
  rows.push(...values);
  return rows;
}

function table(rows) {
  return make("table", null, ...rows.map(([key, ...values]) => make("tr", null, make("td", key),
    ...values.map(value => styled("td", values.length > 1 ? "number" : "", value)))));
}

const listing = rows => make("table", null, ...rows.map(row => make("tr", null, ...row.map(text => make("td", text)))));

function swatch(kind) {
  const element = styled("span", kind.waits ? "swatch wait" : "swatch");
  element.style[kind.waits ? "color" : "background"] = kind.colour;
  element.style.opacity = kind.soft && !kind.waits ? look.soft + .1 : 1;
  return element;
}

function button(text, act) {
  const element = make("button", text);
  element.addEventListener("click", act);
  return element;
}

let summed = false;  // whether the summary was asked for

function details() {
  if (chosen || range) summed = false;
  $("panel").classList.toggle("resting", !chosen && !range && !summed);
  const parts = [chosen ? aboutChosen() : [], range ? aboutRange() : []];
  if (rangeLeads) parts.reverse();
  $("about").replaceChildren(...parts.flat(), ...(chosen || range ? [] : rest()));
}

function aboutChosen() {
  const kind = kinds[valueOf(chosen, "code")], [from, until] = timesOf(chosen).map(moment);
  const times = !isBar(chosen) ? [["at", from]] : valueOf(chosen, "fate") ? [["begins", from]] : [["begins", from], ["ends", until]];
  const process = words.processes[valueOf(chosen, "process")] ?? "?";
  const where = [["lane", laneOf(chosen).title], ["process", `${process}, thread ${valueOf(chosen, "tid")}`]];
  const mine = words.iterators[valueOf(chosen, "loader")];
  const source = [...(mine ? [["yours", mine]] : []), ["ours", kind.ours], ["upstream", kind.upstream || "no such step"], ["article", kind.article]];
  return [
    make("h2", null, swatch(kind), make("span", heading(chosen))),
    make("p", kind.meaning),
    table([...rowsOf(chosen), ...times, ...where]),
    make("h3", "source"),
    make("table", null, ...source.map(([key, value]) => make("tr", null, make("td", key), make("td", null, make("code", value))))),
    stepButtons(valueOf(chosen, "batch")),
    ...batches.map(pathOf),
  ];
}

function stepButtons(batch) {
  const line = styled("div", "row", null,
    button("◂ previous", () => step(-1)), button("next ▸", () => step(1)), button("zoom in", zoomToChosen));
  if (batch >= 0 && !batches.includes(batch)) line.append(button("path of its batch", addBatch));
  if (batches.length) line.append(button("no arrows", () => { batches = []; details(); redraw(); }));
  return line;
}

function pathOf(batch, n) {
  const put = num("batch.put", batch), rows = [];
  let before = put;
  for (let i = stopsOf[batch]; i < stopsOf[batch + 1]; i++) {
    const {begin: from, end: until, code, lane} = stop(i);
    rows.push([kinds[code].label, lanes[lane].title, from > before ? `+${duration(from - before)}` : "", until > from ? duration(until - from) : ""]);
    before = Math.max(before, until);
  }
  const title = make("h3", `batch ${num("batch.task", batch)}, epoch ${num("batch.epoch", batch)}`);
  rows.unshift(["", "lane", "gap before", "took"]);
  const sample = styled("span", "swatch");
  sample.style.background = BATCHES[n % BATCHES.length];
  title.prepend(sample, " ");
  const last = num("batch.yielded", batch) < 0 ? [make("p", "The batch was not yielded.")] : [];
  return make("div", null, title, table(rows), ...last);
}

function rest() {
  const open = openBars();
  return [
    ...said(),
    ...(words.live ? words.live.now.flatMap(one => [make("h3", one.title), make("p", one.rates), listing(one.rows)]) : []),
    ...aboutStalls(),
    ...aboutSlowest(),
    ...aboutWorkers(words.begin, words.last),
    make("h3", "How to read this page"),
    make("p", "Each actor has a lane, each step a bar; the parts of a step are one row deeper. Hatched bars are waits. ▾ marks an event, ✕ a failure."),
    make("p", "The wheel or + and − zoom; dragging or the arrow keys move. Click a bar for its details and the path of its batch. Drag on the time axis to select a range: this panel then says where its time went. ? lists the keys."),
    ...(open.length ? [make("h3", goesOn() ? "under way" : "no end recorded"), table(open.slice(0, 30).map(what => [laneOf(what).title, what.at === words.framed?.bar ? words.framed.words : caption(what.at)[0]]))] : []),
    make("h3", "the trace"), table([...words.facts, ["shown", `${duration(words.last - words.begin)}`]]),
  ];
}

function keys() {
  const rows = [["← →  A D", "move"], ["↑ ↓  PgUp PgDn", "scroll the lanes"], ["+ −  W S", "zoom"], ["0", "show the whole trace"], ["F", "show what the title is about"], ...(words.live ? [["L", "follow the run"]] : []),
    ["[ ]", "select the previous, the next bar in the row"], ["{ }", "select the bar above, below"], ["Enter", "zoom to the selected bar, or to the range"],
    ["B", "draw the path of its batch too"], ["shift ← →", "select a range: move its end"], ["R", "select the range of the selected bar, or of the view"], ["shift S", "save the range, or the view, as a page of its own"], ["C", "collapse or expand the process of the selected bar; also by a click on its name"], ["shift C", "collapse or expand all workers"], ["V", "filter the lanes: worker 3-5, rank 1, loader"], ["/", "search"], [". ,", "next, previous match"], ["N  shift N", "next, previous stall: a long wait of the loop"], ["O  shift O", "next, previous of the slowest steps"], ["Esc", "clear the selection, then the range"], ["?", "this list"]];
  $("panel").classList.remove("resting");
  $("about").replaceChildren(make("h2", "Keys"),
    make("table", null, ...rows.map(([k, text]) => make("tr", null, make("td", null, make("kbd", k)), make("td", text)))),
    make("p", "Search for: 8, t8 or task 8, worker 2, s65 or sample 65, batch 8, epoch 1, iterator 1, rank 1, >500ms, <2s, a step's name, open, error. Several are combined: sample epoch 1 >20ms. Enter goes to the next match. The page's address keeps what is shown and selected: copy it as a link to this moment."));
}
