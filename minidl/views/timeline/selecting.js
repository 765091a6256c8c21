// Selecting: a bar or a mark, the next one, the row above.

function choose(what, follow = true) {
  chosen = what;
  rangeLeads = false;
  say("");
  batches = what && valueOf(what, "batch") >= 0 ? [valueOf(what, "batch")] : [];
  if (what && follow) bringIntoView(what);
  details();
  redraw();
}

function addBatch() {  // keeps the arrows that are drawn
  if (!chosen) return;
  const batch = valueOf(chosen, "batch");
  if (batch >= 0 && !batches.includes(batch)) batches.push(batch);
  details();
  redraw();
}

function bringIntoView(what) {
  reveal(what);
  const [a, b] = timesOf(what), size = v1 - v0;
  if (b > a && (b - a) * scale() < 2) { const half = Math.max((b - a) * 20, 2e5); [v0, v1] = [(a + b) / 2 - half, (a + b) / 2 + half]; }
  else if (b < v0 + size * .02 || a > v1 - size * .02) [v0, v1] = [(a + b) / 2 - size / 2, (a + b) / 2 + size / 2];
  clampView();
  pursue("");
  scrollTo(what);
}

function scrollTo(what) {
  const lane = laneOf(what), top = yOf(lane.top), bottom = top + tall(lane) * row;
  if (top < AXIS + 8) scroller.scrollTop -= AXIS + 14 - top;
  else if (bottom > lanesBottom()) scroller.scrollTop += bottom - lanesBottom() + 8;
}

function frame(what) {  // selects it, with both ends inside the window
  const [a, b] = timesOf(what), size = v1 - v0, fits = b - a > .05 * size && b - a < .85 * size;
  if (b > a && !fits) [v0, v1] = [a - (b - a), b + (b - a)];
  else if (a < v0 || b > v1) [v0, v1] = [(a + b - size) / 2, (a + b + size) / 2];
  choose(what);
}

function say(text) {  // what a key has found, below the timeline
  $("status").textContent = text;
  $("status").hidden = !text;
}

function zoomToChosen() {
  if (!chosen) return;
  const [a, b] = timesOf(chosen), pad = Math.max((b - a) * .15, 200);
  show(a - pad, b + pad);
}

function step(by) {
  if (!chosen) { const first = runs.find(run => lanes[run.lane].kind === "worker") || runs[0]; if (first) choose(bar(visible(first))); return; }
  const run = runOf(chosen), next = chosen.at + by;
  if (next >= run.first && next < run.first + run.count) choose({...chosen, at: next});
}

function stepRow(by) {
  if (!chosen) return step(1);
  const [from, until] = timesOf(chosen), t = (from + Math.min(until, v1)) / 2, now = runOf(chosen);
  const run = runs[(isBar(chosen) ? runs.indexOf(now) : runs.findIndex(r => r.lane === now.lane)) + by];
  if (run) choose(bar(Math.max(run.first, Math.min(run.first + run.count - 1, firstAfter(begin, run.first, run.count, t) - 1))));
}
