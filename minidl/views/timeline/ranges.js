// A selected range of time: by dragging on the axis, or anywhere with shift; by shift and the arrow keys.

let range = null, rangeLeads = false;  // {anchor, head}: ns; the head is the end that moves; leads: it was selected last

const rangeOf = () => [Math.min(range.anchor, range.head), Math.max(range.anchor, range.head)];
const inTrace = t => Math.min(Math.max(t, words.begin), words.last);

let counting = 0;
function selectRange(anchor, head, now = true) {
  range = {anchor: inTrace(anchor), head: inTrace(head)};
  rangeLeads = true;
  clearTimeout(counting);
  const told = () => { details(); redraw(); };
  if (now) told();
  else counting = setTimeout(told, 80);  // counting 600,000 bars takes longer than a frame
  redraw(false);
}

function clearRange() { clearTimeout(counting); range = null; details(); redraw(); }

function extendRange(by) {  // by a share of the view; begins with what is selected, or else in the middle of the view
  const [anchor, head] = range ? [range.anchor, range.head] : chosen ? timesOf(chosen) : [(v0 + v1) / 2, (v0 + v1) / 2];
  selectRange(anchor, head + by * (v1 - v0), false);
  if (range.head > v1 || range.head < v0) pan(by * 2);
}

function rangeHere() {  // the selected bar's time, or the view
  const [from, until] = chosen && isBar(chosen) ? timesOf(chosen) : [v0, v1];
  selectRange(from, until);
}

function zoomToRange() {
  const [from, until] = rangeOf(), pad = Math.max((until - from) * .02, 100);
  show(from - pad, until + pad);
}

function rangeLabel() {  // its left and right end on the axis, and its text
  const [from, until] = rangeOf(), text = duration(until - from), w = widthOf(text, "600 11") + 10;
  const x = Math.max(gutter, Math.min((Math.max(gutter, xOf(from)) + Math.min(wide, xOf(until)) - w) / 2, wide - w));
  return [x, x + w, text];
}

function drawRange() {
  if (!range) return;
  const [from, until] = rangeOf(), x0 = Math.max(gutter, xOf(from)), x1 = Math.min(wide, xOf(until));
  if (x1 < gutter || x0 > wide) return;
  pen.fillStyle = look.accent; pen.globalAlpha = .13; pen.fillRect(x0, AXIS, x1 - x0, high - AXIS);
  pen.globalAlpha = .3; pen.fillRect(x0, 0, x1 - x0, AXIS); pen.globalAlpha = 1;
  for (const t of [from, until]) if (xOf(t) >= gutter && xOf(t) <= wide) pen.fillRect(Math.round(xOf(t)) - .5, 0, 1, high);
  const [left, right, text] = rangeLabel();
  pen.fillStyle = look.accent; pen.fillRect(left, 4, right - left, AXIS - 8);
  write(text, left + 5, AXIS / 2 + .5, look.paper, "left", "600 11px");
}
