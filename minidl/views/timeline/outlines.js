// Outlines around what is selected, pointed at or found.

function placeOf(what) {  // x0, x1, top and size of a bar or a mark on the canvas
  const [x0, x1] = timesOf(what).map(xOf);
  if (isBar(what)) return [x0, Math.max(x1, x0 + 1), ...box(runOf(what))];
  return [x0 - 4, x0 + 4, yOf(laneOf(what).top) - MARK - 2, MARK + 4];
}

function drawOutline(what, colour, weight) {
  if (!what) return;
  const [x0, x1, top, size] = placeOf(what);
  pen.strokeStyle = colour; pen.lineWidth = weight;
  const left = Math.max(x0, gutter - 4), right = Math.min(x1, wide + 4);
  pen.strokeRect(left - 1, top - 1, Math.max(2, right - left) + 2, size + 2);
}

function drawMatches() {
  pen.strokeStyle = look.found; pen.lineWidth = 1.5;
  let pixel = -9, left = 3000;  // more outlines than that cannot be told apart
  for (const what of matches) {
    if (!left) break;
    const [from, until] = timesOf(what);
    if (until < v0 || from > v1) continue;
    const [x0, x1, top, size] = placeOf(what);
    if (x1 - x0 < 3 && Math.abs(x0 - pixel) < 1) continue;
    pixel = x0;
    left--;
    pen.strokeRect(Math.max(x0, gutter - 4) - .5, top - .5, Math.min(x1, wide + 4) - Math.max(x0, gutter - 4) + 1, size + 1);
  }
}
