// The overview: how many workers fetch, over the whole trace.

let overviewBase = null;

function overviewPicture() {
  const n = Math.max(1, Math.floor(wide - gutter)), busy = new Float64Array(n), k = n / (words.end - words.begin);
  for (const run of runs) {
    if (lanes[run.lane].out) continue;
    for (let i = run.first; i < run.first + run.count; i++) {
      if (kindOf(i).name !== "fetch") continue;
      const a = Math.max(0, (begin[i] - words.begin) * k), b = Math.min(n, (end[i] - words.begin) * k);
      for (let p = Math.floor(a); p < b; p++) busy[p] += Math.min(b, p + 1) - Math.max(a, p);
    }
  }
  return busy;
}

function drawOverview() {
  const p = overview.getContext("2d"), h = 34;
  overviewBase ??= overviewPicture();
  p.setTransform(dots, 0, 0, dots, 0, 0);
  p.fillStyle = look.panel; p.fillRect(0, 0, wide, h);
  const most = overviewBase.reduce((a, b) => Math.max(a, b), 1);
  p.fillStyle = kinds[22] ? kinds[22].colour : look.counter; p.globalAlpha = .75;
  p.beginPath(); p.moveTo(gutter, h - 3);
  overviewBase.forEach((b, i) => { const y = h - 3 - b / most * (h - 8); p.lineTo(gutter + i, y); p.lineTo(gutter + i + 1, y); });
  p.lineTo(gutter + overviewBase.length, h - 3); p.fill();
  p.globalAlpha = 1;
  const n = wide - gutter, x = t => gutter + (t - words.begin) / (words.end - words.begin) * n;
  p.fillStyle = look.alarm;
  for (const i of alarmMarks) if (!weak(i)) p.fillRect(x(marks[i]) - 1, 2, 2, h - 4);
  for (const {time} of words.deaths) p.fillRect(x(time) - 1, 2, 2, h - 4);
  p.fillStyle = look.paper; p.globalAlpha = .62;
  const a = Math.max(gutter, x(v0)), b = Math.min(wide, x(v1));
  p.fillRect(gutter, 0, a - gutter, h); p.fillRect(b, 0, wide - b, h);
  p.globalAlpha = 1; p.strokeStyle = look.accent; p.lineWidth = 1.5;
  p.strokeRect(a + .75, .75, Math.max(3, b - a) - 1.5, h - 1.5);
  pen = p;
  write("workers fetching", gutter - 8, h / 2, look.faint, "right", "10.5px");
}

function overviewDrag(event) {
  const n = wide - gutter, x = event.clientX - overview.getBoundingClientRect().left;
  const t = words.begin + (x - gutter) / n * (words.end - words.begin), half = (v1 - v0) / 2;
  show(t - half, t + half);
}
overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); overviewDrag(event); });
overview.addEventListener("pointermove", event => { if (event.buttons & 1) overviewDrag(event); });
