// Paths of batches as arrows.

function drawArrows() {
  batches.forEach((batch, n) => {
    const colour = BATCHES[n % BATCHES.length];
    for (let i = stopsOf[batch] + 1; i < stopsOf[batch + 1]; i++) {
      const from = stop(i - 1), to = stop(i);
      arrow(xOf(Math.min(from.end, to.begin)), from.y, xOf(to.begin), to.y, colour);
    }
  });
}

function stop(i) {
  const lane = num("stop.lane", i), code = num("stop.code", i);
  const [top, size] = box({lane, row: num("stop.row", i)});
  return {y: top + size / 2, begin: num("stop.begin", i), end: num("stop.end", i), code, lane};
}

function within(x0, y0, x1, y1) {  // the line's second end, cut where a canvas can no longer draw
  const far = 2e4, x = Math.max(-far, Math.min(far, x1));
  return [x, x1 === x0 ? y1 : y0 + (y1 - y0) * (x - x0) / (x1 - x0)];
}

function arrow(fromX, fromY, toX, toY, colour, straight = false) {
  if (Math.max(fromX, toX) < gutter || Math.min(fromX, toX) > wide) return;
  const [x1, y1] = within(fromX, fromY, toX, toY), [x0, y0] = within(toX, toY, fromX, fromY);
  const bend = straight ? 0 : Math.max(-40, Math.min(40, (y1 - y0) * .12)), mx = (x0 + x1) / 2 - bend, my = (y0 + y1) / 2 + (straight ? 0 : 1) * Math.min(16, Math.abs(x1 - x0) * .05);
  const angle = Math.atan2(y1 - my, x1 - mx);
  for (const [style, weight] of [["#ffffff", 4], [colour, 1.8]]) {
    pen.strokeStyle = style; pen.fillStyle = style; pen.lineWidth = weight;
    pen.beginPath(); pen.moveTo(x0, y0); pen.quadraticCurveTo(mx, my, x1, y1); pen.stroke();
  }
  pen.beginPath(); pen.moveTo(x1, y1);
  for (const side of [-.42, .42]) pen.lineTo(x1 - 9 * Math.cos(angle + side), y1 - 9 * Math.sin(angle + side));
  pen.closePath(); pen.strokeStyle = "#ffffff"; pen.lineWidth = 2; pen.stroke(); pen.fill();
}
