// The counters below the lanes, and their values at the pointer.

function drawCounters(bottom) {
  if (!counters.length) return;
  pen.fillStyle = look.paper; pen.fillRect(0, bottom, wide, high - bottom);
  pen.strokeStyle = look.line; pen.lineWidth = 1;
  pen.beginPath(); pen.moveTo(0, bottom + .5); pen.lineTo(wide, bottom + .5); pen.stroke();
  counterNames().forEach((name, n) => {
    const top = bottom + 8 + n * (counterHigh + GAP), mine = shownCounters().filter(c => c.name === name);
    const most = Math.max(1, ...mine.map(c => c.most)), unit = mine[0].unit;
    drawGrid(top, top + counterHigh);
    for (const counter of mine) drawCounter(counter, top, most, slotColour(counter.slot), mine.length === 1);
    pen.fillStyle = look.paper; pen.fillRect(0, top - 2, gutter, counterHigh + 4);
    write(name, gutter - 8, top + counterHigh / 2 - (counterHigh > 24 ? 7 : 5), look.ink, "right");
    const peak = unit === "B" ? shortBytes(most) : `${most} ${most === 1 ? unit.replace(/(?<=ch)es$|s$/, "") : unit}`;
    write(`max ${peak}`, gutter - 8, top + counterHigh / 2 + (counterHigh > 24 ? 7 : 6), look.faint, "right", "10px");
  });
}

function drawCounter(counter, top, most, colour, filled) {
  const {times, values} = counter, base = top + counterHigh, y = v => base - v / most * (counterHigh - 2), k = scale();
  let i = Math.max(0, firstAfter(times, 0, times.length, v0) - 1), x = gutter, value = times[i] <= v0 ? values[i] : 0;
  const from = Math.max(0, xOf(words.begin)), points = [[Math.max(gutter, from), y(value)]];
  if (times[i] <= v0) i++;
  for (; i < times.length && times[i] <= v1;) {
    x = Math.floor(xOf(times[i]));
    let low = values[i], up = values[i];
    const until = v0 + (x + 1 - gutter) / k;
    for (; i < times.length && times[i] < until; i++) {
      value = values[i];
      if (value < low) low = value; else if (value > up) up = value;
    }
    if (!(times[i - 1] >= 0)) break;
    points.push([x, points[points.length - 1][1]], [x, y(up)], [x, y(low)], [x, y(value)]);
    if (i < times.length && times[i] < until) i++;
  }
  points.push([Math.min(wide, xOf(words.last)), y(value)]);
  clipped(gutter, top - 1, wide - gutter, counterHigh + 2, () => {
    pen.beginPath();
    points.forEach(([px, py], n) => n ? pen.lineTo(px, py) : pen.moveTo(px, py));
    pen.strokeStyle = colour; pen.lineWidth = 1.2; pen.stroke();
    if (!filled) return;  // areas of several ranks over each other would be one mud
    pen.lineTo(points[points.length - 1][0], base); pen.lineTo(points[0][0], base); pen.closePath();
    pen.fillStyle = colour; pen.globalAlpha = .15; pen.fill();
  });
}

function drawPointer(bottom) {
  if (!pointer || pointer.x < gutter) return;
  pen.strokeStyle = look.faint; pen.globalAlpha = .5; pen.lineWidth = 1;
  pen.beginPath(); pen.moveTo(pointer.x + .5, AXIS); pen.lineTo(pointer.x + .5, high); pen.stroke();
  pen.globalAlpha = 1;
  const t = tOf(pointer.x), [factor, unit] = UNITS.find(([f]) => Math.abs(t) >= f) || UNITS[3];
  const text = `${(t / factor).toFixed(Math.max(0, Math.ceil(Math.log10(factor * scale()))))} ${unit}`;
  const w = widthOf(text, 11) + 10, x = Math.max(gutter, Math.min(pointer.x - w / 2, wide - w - 2));
  pen.fillStyle = look.ink; pen.fillRect(x, 4, w, AXIS - 8);
  write(text, x + 5, AXIS / 2 + .5, look.paper);
  counterNames().forEach((name, n) => {
    const top = bottom + 8 + n * (counterHigh + GAP);
    const values = shownCounters().filter(c => c.name === name).map(c => valueAt(c, t));
    const text = (counters.find(c => c.name === name).unit === "B" ? values.map(shortBytes) : values).join(" · ");
    const w = widthOf(text, "600 11"), x = Math.min(pointer.x + 5, wide - w - 6);
    pen.fillStyle = look.paper; pen.globalAlpha = .8; pen.fillRect(x - 2, top, w + 4, 14); pen.globalAlpha = 1;
    write(text, x, top + 7, look.ink, "left", "600 11px");
  });
}

function valueAt(counter, t) {
  const i = firstAfter(counter.times, 0, counter.times.length, t);
  return i ? counter.values[i - 1] : 0;
}
