// Drawing: one frame, in the order of its layers; bands, grid and axis.

function firstAfter(array, from, count, value) {  // first index in [from, from + count) whose element is > value
  let low = from, up = from + count;
  while (low < up) { const middle = (low + up) >> 1; if (array[middle] > value) up = middle; else low = middle + 1; }
  return low;
}

function visible(run) { return run.first + firstAfter(run.until, 0, run.count, v0 - 1 / scale()); }

function draw() {
  const started = performance.now();
  pen = base;
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.fillStyle = look.paper;
  pen.fillRect(0, 0, wide, high);
  const bottom = lanesBottom();
  clipped(0, AXIS, wide, bottom - AXIS, () => {
    drawBands();
    inView.clear();
    drawGrid(AXIS, bottom);
    clipped(gutter, AXIS, wide - gutter, bottom - AXIS, () => {
      for (const run of runs) drawRun(run, bottom);
      for (const run of markRuns) drawMarks(run, bottom);
      drawMatches();
      drawOutline(chosen, look.accent, 2);
      taken = [];
      drawFramed();
      drawDeaths(bottom);
      drawAlarms(bottom);
      drawArrows();
      drawCause();
    });
    drawNames(bottom);
  });
  drawCounters(bottom);
  drawAxis();
  drawOverview();
  paleLegend();
  root.dataset.frame = (performance.now() - started).toFixed(1);
}

function drawOver() {
  pen = upper;
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.clearRect(0, 0, wide, high);
  const bottom = lanesBottom();
  clipped(gutter, AXIS, wide - gutter, bottom - AXIS, () => drawOutline(hovered, look.ink, 1));
  drawRange();
  keepAddress();
  drawPointer(bottom);
}

function clipped(left, top, w, h, drawing) {
  pen.save();
  pen.beginPath(); pen.rect(left, top, w, h); pen.clip();
  drawing();
  pen.restore();
}

function write(text, x, y, colour, align = "left", font = "11px") {
  pen.font = `${font} ${FONT}`; pen.fillStyle = colour; pen.textAlign = align; pen.textBaseline = "middle";
  pen.fillText(text, x, y);
}

function drawBands() {
  for (const lane of lanes) {
    pen.fillStyle = lane.kind === "feeder" ? look.band2 : look.band;
    const top = yOf(lane.top);
    pen.fillRect(gutter, top, wide - gutter, tall(lane) * row);
  }
}

function ticks() {
  const last = Math.min(v1, words.last);  // what is drawn beyond the trace's end has no number
  const [factor, unit] = unitOf(last), least = (v1 - v0) / factor / Math.max(2, (wide - gutter) / 110);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = factor * [1, 2, 5, 10].map(m => m * power).find(s => s >= least);
  const out = [];
  for (let t = Math.ceil(Math.max(v0, words.begin) / step) * step; t <= last; t += step) out.push(t);
  const digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  return out.map(t => [t, `${(t / factor).toFixed(digits)}`, unit]);
}

function drawGrid(top, bottom) {
  pen.strokeStyle = look.grid; pen.lineWidth = 1;
  pen.beginPath();
  for (const [t] of ticks()) { const x = Math.round(xOf(t)) + .5; pen.moveTo(x, top); pen.lineTo(x, bottom); }
  pen.stroke();
  if (words.end === words.last || words.last > v1) return;
  pen.fillStyle = look.faint; pen.fillRect(xOf(words.last), top, 1, bottom - top);  // the trace's end
}

function drawAxis() {
  pen.fillStyle = look.paper; pen.fillRect(0, 0, wide, AXIS);
  const all = ticks(), end = words.end > words.last && words.last <= v1 ? Math.max(xOf(words.last) - 5, gutter + 120) : Infinity;
  const free = end - widthOf(words.end_of_trace, 11) - 22;  // the trace's end is said in place of a number
  const flag = captionOnAxis(end < wide ? free : wide), onAxis = flag || range && rangeLabel(), covered = x => onAxis && x > onAxis[0] - 24 && x < onAxis[1] + 24;
  if (flag) {
    pen.fillStyle = blame(); pen.fillRect(flag[0], 3, flag[1] - flag[0], AXIS - 6);
    write(flag[2], flag[0] + 5, AXIS / 2 + .5, look.paper, "left", "600 12px");
  }
  for (const [t, text] of all) if (xOf(t) > gutter + 12 && xOf(t) < Math.min(wide - 24, free) && !covered(xOf(t))) write(text, xOf(t), AXIS / 2, look.faint, "center");
  if (end < wide) {
    write(words.end_of_trace, end, AXIS / 2, look.ink, "right");
    pen.fillStyle = look.ink; pen.fillRect(xOf(words.last), 4, 1, AXIS - 4);
  }
  write(`${all.length ? all[0][2] : ""} since start`, gutter - 8, AXIS / 2, look.faint, "right");
  pen.strokeStyle = look.line; pen.beginPath(); pen.moveTo(0, AXIS - .5); pen.lineTo(wide, AXIS - .5); pen.stroke();
}
