// The bar or mark under the pointer, and the tip beside it.

function at(x, y) {
  if (x < gutter || y < AXIS || y > lanesBottom()) return null;
  const t = tOf(x), near = 4 / scale();
  for (const run of markRuns) {
    const top = yOf(lanes[run.lane].top);
    if (lanes[run.lane].closed || y < top - MARK - 3 || y > top + 1) continue;
    let best = -1, away = near;
    for (let i = firstAfter(marks, run.first, run.count, t - near); i < run.first + run.count && marks[i] <= t + near; i++)
      if (Math.abs(marks[i] - t) <= away) { best = i; away = Math.abs(marks[i] - t); }
    if (best >= 0) return mark(best);
  }
  for (const run of runs) {
    const [top, size] = box(run);
    if (size <= 0 || y < top - 1 || y > top + size + 1) continue;
    let best = -1, score = -Infinity;
    const from = run.first + firstAfter(run.until, 0, run.count, t - near);
    for (let i = from; i < run.first + run.count && begin[i] <= t + near; i++) {
      // A bar under the pointer comes before one near it; of several, the longest is preferred.
      const inside = begin[i] <= t && t <= end[i] ? 1e18 : 0, value = inside + end[i] - begin[i];
      if (end[i] >= t - near && value > score) { best = i; score = value; }
    }
    if (best >= 0) return bar(best);
  }
  return null;
}

function hideTip() { $("tip").style.display = "none"; hovered = null; }

function tip(what, x, y) {
  const element = $("tip");
  if (!what) { element.style.display = "none"; return; }
  element.replaceChildren(make("b", heading(what)), ...rowsOf(what).slice(0, 7).map(([k, v]) => make("small", `${k}: ${v}`)));
  element.style.display = "block";
  const stage = $("stage"), top = y + overview.offsetHeight;
  element.style.left = `${Math.max(4, Math.min(x + 14, stage.clientWidth - element.offsetWidth - 6))}px`;
  element.style.top = `${Math.max(4, Math.min(top + 16, stage.clientHeight - element.offsetHeight - 6))}px`;
}
