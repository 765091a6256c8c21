// What the headline blames: its frame, and the arrow from the wait for it.

const blame = () => words.headline.wrong ? look.alarm : look.ink;

// A bar that the frame names has no other name.
const isNamed = i => Boolean(words.framed?.alone) && words.framed.bar === i;

function placeOfRow([lane, level]) {  // top and height; level -1 = all of the lane
  return level < 0 || !lanes[lane].heights[level] ? [yOf(lanes[lane].top), tall(lanes[lane]) * row] : box({lane, row: level});
}

function drawFramed() {  // what the title blames
  const framed = words.framed;
  if (!framed || lanes[framed.rows[0][0]].hidden) return;
  const [x0, x1] = [xOf(framed.begin), Math.max(xOf(framed.end), xOf(framed.begin) + 1)], colour = blame();
  if (x0 > wide || x1 < gutter) return;
  const left = Math.max(x0, gutter - 4), right = Math.min(x1, wide + 4);
  pen.strokeStyle = colour; pen.lineWidth = 2.5;
  for (const at of framed.rows) {
    const [top, size] = placeOfRow(at);
    pen.strokeRect(left - 1, top - 1, Math.max(2, right - left) + 2, size + 2);
  }
  const [top, size] = placeOfRow(framed.rows[0]);
  if (isCaptionInside()) {
    const from = Math.max(x0, gutter) + 2;
    pen.fillStyle = look.paper; pen.globalAlpha = .9; pen.fillRect(from, top + 1, widthOf(framed.words, "600 12") + 8, size - 2); pen.globalAlpha = 1;
    write(framed.words, from + 4, top + size / 2 + .5, colour, "left", "600 12px");
  } else if (x0 >= gutter) { pen.fillStyle = colour; pen.globalAlpha = .5; pen.fillRect(x0, AXIS, 1, top - AXIS); pen.globalAlpha = 1; }
}

function isCaptionInside() {  // in the bar, if it is one and has room; on the axis otherwise, where it covers no lane
  const {alone, rows, begin: from, end: until, words: text} = words.framed, size = placeOfRow(rows[0])[1];
  return alone && size >= 13 && Math.min(xOf(until), wide) - Math.max(xOf(from), gutter) - 2 > widthOf(text, "600 12") + 12;
}

function captionOnAxis(limit) {  // its left and right end, up to `limit`, and its words; null = it is not drawn there, or a range's length is
  const framed = words.framed;
  if (!framed || range || lanes[framed.rows[0][0]].hidden || isCaptionInside() || xOf(framed.begin) > wide || xOf(framed.end) < gutter) return null;
  const sizeOf = text => widthOf(text, "600 12") + 10, text = sizeOf(framed.words) > limit - gutter ? framed.words.split(", ")[0] : framed.words;
  const left = Math.max(gutter, Math.min(xOf(framed.begin), limit - sizeOf(text)));
  return [left, left + sizeOf(text), text];
}

function drawCause() {  // from the wait to what it waits for; where it is drawn: as `scene.Pointer.at`
  const cause = words.cause;
  if (!cause || lanes[cause.from_lane].hidden || lanes[cause.to_lane].hidden) return;
  const left = Math.max(cause.begin, v0), right = Math.min(cause.end, v1);
  const ended = cause.reached >= 0;  // before it was waited for
  if (left >= right || ended && (cause.reached < v0 || cause.reached > v1)) return;
  const x = xOf(ended ? left : left + .75 * (right - left)), [y, size] = placeOfRow([cause.from_lane, cause.from_row]);
  const [top, high] = placeOfRow([cause.to_lane, cause.to_row]);
  const reachedY = ended ? top + high / 2 : cause.from_lane < cause.to_lane ? top : top + high;
  arrow(x, y + size / 2, ended ? xOf(cause.reached) : x, reachedY, blame(), true);
}
