// The overview: over the whole trace, when the loops waited (on top) and when each worker was busy.

let overviewBase = null, overviewRows = [];  // its picture; the lane of each worker

const overviewParts = () => {  // heights of the loops' rows and of the workers' rows, pixels
  const loops = shownSlots().length, workers = lanes.filter(lane => lane.kind === "worker" && !lane.out).length;
  const most = Math.max(26, Math.min(96, scroller.parentElement.clientHeight * .16));
  return [Math.max(15, Math.min(24, 4 * loops)), workers ? Math.max(24, Math.min(most, 5 * workers)) : 0];
};
const overviewHigh = () => overviewParts().reduce((a, b) => a + b) + 2;

function shares(rows, n, eachBar) {  // how much of each pixel is covered, by row; eachBar(row, act(bar))
  const out = rows.map(() => new Float32Array(n)), k = n / (words.end - words.begin);
  rows.forEach((one, r) => eachBar(one, i => {
    const a = Math.max(0, (begin[i] - words.begin) * k), b = Math.min(n, (Math.min(end[i], words.last) - words.begin) * k);
    for (let p = Math.floor(a); p < b; p++) out[r][p] += Math.min(b, p + 1) - Math.max(a, p);
  }));
  return out;
}

function painted(p, rows, top, size, colour) {  // rows of shares as a picture
  const n = rows[0].length, [red, green, blue] = rgb(colour), h = Math.max(1, Math.round(size * dots));
  const image = p.createImageData(n, h);
  for (let y = 0; y < h; y++) {  // of rows that share a pixel, the mean
    const from = Math.floor(y * rows.length / h), until = Math.max(from + 1, Math.ceil((y + 1) * rows.length / h));
    for (let x = 0; x < n; x++) {
      let share = 0;
      for (let r = from; r < until; r++) share += rows[r][x];
      const at = 4 * (y * n + x);
      [image.data[at], image.data[at + 1], image.data[at + 2]] = [red, green, blue];
      image.data[at + 3] = 255 * Math.min(1, share / (until - from));
    }
  }
  const piece = document.createElement("canvas");
  piece.width = n; piece.height = h;
  piece.getContext("2d").putImageData(image, 0, 0);
  p.imageSmoothingEnabled = false;
  p.drawImage(piece, 0, Math.round(top * dots));
}

function overviewPicture() {
  const n = Math.max(1, Math.floor((wide - gutter) * dots)), [loops, workers] = overviewParts(), made = document.createElement("canvas"), p = made.getContext("2d");
  made.width = n; made.height = Math.ceil((loops + workers + 2) * dots);
  const slots = shownSlots();
  overviewRows = lanes.filter(lane => lane.kind === "worker" && !lane.out);
  if (slots.length) painted(p, shares(slots, n, (slot, act) => waitsOf(slot).forEach(act)), 0, loops, look.found);
  if (overviewRows.length) painted(p, shares(overviewRows, n, (lane, act) => {
    for (const run of runs) if (lanes[run.lane] === lane && run.row === 0)
      for (let i = run.first; i < run.first + run.count; i++) if (!kindOf(i).waits) act(i);
  }), loops + 2, workers, colourNamed("fetch") || look.counter);
  return made;
}

function drawOverview() {
  const p = overview.getContext("2d"), [loops, workers] = overviewParts(), h = loops + workers + 2;
  overviewBase ??= overviewPicture();
  p.setTransform(dots, 0, 0, dots, 0, 0);
  p.fillStyle = look.panel; p.fillRect(0, 0, wide, h);
  p.drawImage(overviewBase, gutter, 0, overviewBase.width / dots, overviewBase.height / dots);
  const n = wide - gutter, x = t => gutter + (t - words.begin) / (words.end - words.begin) * n;
  p.fillStyle = look.alarm;
  for (const i of alarmMarks) if (!weak(i)) p.fillRect(x(marks[i]) - 1, 2, 2, h - 4);
  for (const {time} of words.deaths) p.fillRect(x(time) - 1, 2, 2, h - 4);
  if (range) { const [from, until] = rangeOf().map(x); p.fillStyle = look.accent; p.fillRect(from, 0, Math.max(1, until - from), 3); }
  p.fillStyle = look.paper; p.globalAlpha = .55;
  const a = Math.max(gutter, x(v0)), b = Math.min(wide, x(v1));
  p.fillRect(gutter, 0, a - gutter, h); p.fillRect(b, 0, wide - b, h);
  p.globalAlpha = 1; p.strokeStyle = look.accent; p.lineWidth = 1.5;
  p.strokeRect(a + .75, .75, Math.max(3, b - a) - 1.5, h - 1.5);
  pen = p;
  write(words.slots.length > 1 ? "the loops wait" : "the loop waits", gutter - 8, loops / 2 + .5, look.faint, "right", "10.5px");
  if (workers) write("workers are busy", gutter - 8, loops + 2 + workers / 2, look.faint, "right", "10.5px");
}

function overviewDrag(event) {
  const n = wide - gutter, area = overview.getBoundingClientRect(), x = event.clientX - area.left;
  const t = words.begin + (x - gutter) / n * (words.end - words.begin), half = (v1 - v0) / 2;
  show(t - half, t + half);
  const [loops, workers] = overviewParts(), at = (event.clientY - area.top - loops - 2) / workers;
  const lane = overviewRows[Math.floor(at * overviewRows.length)];  // a worker's row: to its lane
  if (lane && !lane.hidden && (yOf(lane.top) < AXIS || yOf(lane.top) + tall(lane) * row > lanesBottom())) scroller.scrollTop += yOf(lane.top) - (AXIS + lanesBottom()) / 2;
}
overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); overviewDrag(event); });
overview.addEventListener("pointermove", event => { if (event.buttons & 1) overviewDrag(event); });
