// The view: which part of the trace is shown, where its lanes stand on the canvas, light and dark.

const canvas = $("canvas"), over = $("over"), scroller = $("scroller"), overview = $("overview");
const base = canvas.getContext("2d", {alpha: false}), upper = over.getContext("2d");
let pen = base;
const AXIS = 26, GAP = 10, MARK = 6;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const {actors: ACTORS, batches: BATCHES, hatched: HATCHED} = words.colours;
let row = 20, counterHigh = 40, gutter = 118, wide = 800, high = 400, dots = 1, v0 = 0, v1 = 1, look = {}, pending = false, stale = true;
let chosen = null, hovered = null, batches = [], matches = [], matchAt = -1, pointer = null;

const scale = () => (wide - gutter) / (v1 - v0);
const xOf = t => gutter + (t - v0) * scale();
const tOf = x => v0 + (x - gutter) / scale();
const tall = lane => lane.heights.reduce((a, b) => a + b);
const units = () => Math.max(1, ...lanes.map(lane => lane.top + tall(lane)));
const countersHigh = () => counterNames().length * (counterHigh + GAP) + (counters.length ? 6 : 0);
const shownCounters = () => counters.filter(c => lanes.some(lane => lane.slot === c.slot && !lane.out));
const counterNames = () => [...new Set(shownCounters().map(c => c.name))];
const lanesBottom = () => high - countersHigh();
const yOf = down => AXIS + 10 + down * row - scroller.scrollTop;
const rowTop = (lane, n) => lane.heights.slice(0, n).reduce((a, b) => a + b, lane.top);

function box(run) {
  const lane = lanes[run.lane], size = lane.heights[run.row] * row, margin = Math.min(1.5, size * .08);
  return [yOf(rowTop(lane, run.row)) + margin, size - 2 * margin];
}

function clampView() {
  const all = words.end - words.begin, slack = all * .04;
  let size = Math.min(Math.max(v1 - v0, 40), all + 2 * slack);
  v0 = Math.min(Math.max(v0, words.begin - slack), words.end + slack - size);
  v1 = v0 + size;
}

function show(from, to) { [v0, v1] = [from, to]; clampView(); hideTip(); pursue(v1 >= words.end ? "edge" : ""); redraw(); }
function showAll() { const pad = (words.end - words.begin) * .004; show(words.begin - pad, words.end + pad); }
function zoom(factor, x = gutter + (wide - gutter) / 2) { const t = tOf(x); show(t - (t - v0) * factor, t + (v1 - t) * factor); }

function pan(share) { const by = (v1 - v0) * share; show(v0 + by, v1 + by); }

function redraw(all = true) {  // the pointer's marks have a canvas of their own, so that hovering repaints nothing else
  stale ||= all;
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; if (stale) draw(); stale = false; drawOver(); });
}

function resize() {
  dots = window.devicePixelRatio || 1;
  wide = scroller.clientWidth; high = scroller.clientHeight;
  const titles = [...lanes.map(lane => lane.title), ...counterNames(), "workers are busy"];
  gutter = Math.min(Math.max(wide < 560 ? 84 : 118, ...titles.map(t => widthOf(t, 12) + 18)), wide * .4);
  overview.style.height = `${overviewHigh() + 1}px`;  // with its border
  counterHigh = Math.max(18, Math.min(40, high * .06));
  row = Math.max(LEAST, Math.min(32, (lanesBottom() - AXIS - 22) / units()));
  for (const [element, h] of [[canvas, high], [over, high], [overview, overviewHigh()]]) {
    element.width = Math.round(wide * dots); element.height = Math.round(h * dots);
  }
  $("view").style.height = `${high}px`;
  $("spacer").style.height = `${Math.max(0, AXIS + 10 + units() * row + 12 + countersHigh() - high)}px`;
  overviewBase = null;
  draw();  // at once: a new size has cleared the canvas
  drawOver();
}

function retheme() {
  for (const name of ["paper", "panel", "band", "band2", "line", "grid", "ink", "faint", "accent", "alarm", "found", "counter"])
    look[name] = colourOf(name);
  look.soft = Number(colourOf("soft"));
  overviewBase = null;
  redraw();
}
