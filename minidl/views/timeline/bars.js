// The bars of a row, and what is narrower than a pixel.

// Bars narrower than a pixel are added up: a colour is as dense as its share of the pixel's time. A strip is a row of such
// pixels, drawn at once.
const inView = new Set();  // codes of what the last frame drew
const strip = {
  canvas: document.createElement("canvas"), sums: new Float32Array(0), length: 0, from: 0, to: 0,
  start() {
    const length = Math.max(1, Math.ceil((wide - gutter) * dots));
    if (length !== this.length) {
      this.length = this.canvas.width = length;
      this.canvas.height = 1;
      this.sums = new Float32Array(4 * length);
      this.pen = this.canvas.getContext("2d");
      this.image = this.pen.createImageData(length, 1);
    }
    [this.from, this.to] = [length, -1];
  },
  add(at, part, [red, green, blue], alpha) {
    if (at < 0 || at >= this.length) return;
    if (at < this.from) this.from = at;
    if (at > this.to) this.to = at;
    const sums = this.sums, i = 4 * at, weight = part * alpha;
    sums[i] += red * weight; sums[i + 1] += green * weight; sums[i + 2] += blue * weight; sums[i + 3] += weight;
  },
  addSums(at, factor, from, first) {
    if (at < 0 || at >= this.length) return;
    if (at < this.from) this.from = at;
    if (at > this.to) this.to = at;
    for (let c = 0; c < 4; c++) this.sums[4 * at + c] += from[first + c] * factor;
  },
  draw(top, size, least) {
    if (this.to < 0) return;
    const sums = this.sums, out = this.image.data;
    out.fill(0);
    for (let i = 4 * this.from; i <= 4 * this.to; i += 4) {
      const weight = sums[i + 3];
      if (!weight) continue;
      for (let c = 0; c < 3; c++) { out[i + c] = sums[i + c] / weight; sums[i + c] = 0; }
      out[i + 3] = 255 * Math.min(1, Math.max(least, weight));
      sums[i + 3] = 0;
    }
    this.pen.putImageData(this.image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.canvas, gutter, top, this.length / dots, size);
  },
};

const rgbOf = new Map();
function rgb(colour) {
  if (!rgbOf.has(colour)) rgbOf.set(colour, [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16)));
  return rgbOf.get(colour);
}

function weighBar(i) {
  const kind = kindOf(i);
  return col["bar.fate"][i] && faded(i) ? null : [rgb(kind.colour), Math.max(1, end[i] - begin[i]) * (kind.soft ? look.soft : 1)];
}

const codesOf = run => run.codes ??= new Set(col["bar.code"].subarray(run.first, run.first + run.count));

function drawRun(run, bottom) {
  const [top, size] = box(run);
  if (size <= 0 || top + size < AXIS || top > bottom) return;
  const k = scale(), code = col["bar.code"], fate = col["bar.fate"], last = run.first + run.count, big = [];
  let colour, alpha = 1, known = -1;
  const groups = groupsOf(run, k * dots, kept.bar, weighBar);
  if (groups) for (const one of codesOf(run)) inView.add(one);
  strip.start();
  for (let i = visible(run), taken = 0; i < last && begin[i] <= v1; i += taken || 1) {
    if (groups && (taken = addGroup(groups, run, i, k, k * dots))) continue;
    const w = (end[i] - begin[i]) * k;
    if (w >= 1 || (fate[i] && faded(i))) { big.push(i); inView.add(code[i]); continue; }
    if (code[i] !== known) {
      inView.add(known = code[i]);
      colour = rgb(kinds[known].colour); alpha = kinds[known].soft ? look.soft : 1;
    }
    strip.add(Math.floor(((begin[i] + end[i]) / 2 - v0) * k * dots), Math.max(w * dots, 1e-6), colour, alpha);
  }
  strip.draw(top, size, .15);
  for (const i of big) drawBar(i, kinds[code[i]], gutter + (begin[i] - v0) * k, gutter + (end[i] - v0) * k, top, size);
}

function drawBar(i, kind, x0, x1, top, size) {
  const left = Math.max(x0, gutter - 2), right = Math.min(x1, wide + 2), w = Math.max(1, right - left);
  const alpha = kind.soft ? look.soft : 1;
  if (faded(i)) drawFading(kind, left, right, x1, top, size, alpha);
  else {
    pen.globalAlpha = kind.waits && w > 3 ? HATCHED * (kind.stage === "idle" ? .5 : 1) : alpha;
    pen.fillStyle = kind.colour;
    pen.fillRect(left, top, w > 3 ? w - .6 : w, size);
    pen.globalAlpha = 1;
    if (kind.waits && w > 3) hatch(kind, left, top, w - .6, size);
    if (col["bar.simulated"][i]) { pen.fillStyle = pattern("dots", "#ffffff"); pen.fillRect(left, top, w, size); }
  }
  pen.globalAlpha = 1;
  if (w > 14 && size >= 9) drawCaption(i, kind, left, right, top, size);
}

function drawFading(kind, left, right, x1, top, size, alpha) {
  const rest = x1 <= wide + 2 ? .08 : .55, fade = pen.createLinearGradient(left, 0, Math.max(right, left + 1), 0);
  fade.addColorStop(0, kind.colour); fade.addColorStop(1, kind.colour + Math.round(rest * 255).toString(16).padStart(2, "0"));
  pen.globalAlpha = kind.waits ? HATCHED : alpha; pen.fillStyle = fade;
  pen.fillRect(left, top, Math.max(1, right - left), size);
  if (kind.waits) hatch(kind, left, top, right - left, size, false);
  pen.globalAlpha = 1; pen.strokeStyle = kind.colour; pen.lineWidth = 1; pen.setLineDash([2, 3]);
  pen.strokeRect(left + .5, top + .5, Math.max(1, right - left - 1), size - 1);
  pen.setLineDash([]);
}

function hatch(kind, left, top, w, size, outlined = true) {  // of a wait; idle workers are the quietest of all
  const {colour, stage} = kind, idle = stage === "idle";
  pen.globalAlpha = idle ? .16 : .4;
  pen.fillStyle = pattern("lines", colour);
  pen.fillRect(left, top, w, size);
  if (outlined && w > 4 && !idle) { pen.strokeStyle = colour; pen.lineWidth = 1; pen.strokeRect(left + .5, top + .5, w - 1, size - 1); }
  pen.globalAlpha = 1;
}

const patterns = new Map();
function pattern(kind, colour) {
  const key = kind + colour + dots;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas"), step = kind === "dots" ? 5 : 7, p = tile.getContext("2d");
    tile.width = tile.height = step * dots;
    p.scale(dots, dots); p.fillStyle = p.strokeStyle = colour; p.lineWidth = 1;
    p.beginPath();
    if (kind === "dots") { p.arc(step / 2, step / 2, 1.1, 0, 7); p.fill(); }
    else for (const x of [-step, 0, step]) { p.moveTo(x - 1, step + 1); p.lineTo(x + step + 1, -1); }
    if (kind !== "dots") p.stroke();
    const made = base.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(1 / dots));
    patterns.set(key, made);
  }
  return patterns.get(key);
}

const measured = new Map();
function widthOf(text, px) {
  const key = px + text;
  if (!measured.has(key)) { if (measured.size > 20000) measured.clear(); pen.font = `${px}px ${FONT}`; measured.set(key, pen.measureText(text).width); }
  return measured.get(key);
}

function inkOn(colour) {  // black or white, whichever contrasts more: at least 4.5 to 1, as WCAG 2 counts
  const [r, g, b] = rgb(colour).map(part => part / 255).map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b > .179 ? "#000000" : "#ffffff";
}

function drawCaption(i, kind, left, right, top, size) {
  const px = Math.max(9, Math.min(11, Math.round(size * .74))), room = Math.min(right, wide) - Math.max(left, gutter) - 6;
  const fate = faded(i) && kind.stage !== "idle" ? words.fates[col["bar.fate"][i]] : "";
  const [full, short] = caption(i);
  const patterned = col["bar.simulated"][i] || kind.waits || fate, spare = patterned ? 22 : 0;  // some of a pattern stays visible
  const text = [fate && `${full}: ${fate}`, full, short].find(t => t && widthOf(t, px) + spare < room);
  if (!text || isNamed(i)) return;
  const ink = kind.soft || fate ? look.ink : inkOn(kind.colour);
  const x = fate ? Math.max(left, gutter) + 4 : (Math.max(left, gutter) + Math.min(right, wide)) / 2;
  if (patterned) {  // the words stand on no pattern
    const w = widthOf(text, px) + 6;
    pen.fillStyle = kind.waits || fate ? look.band : kind.colour;
    pen.fillRect(fate ? x - 3 : x - w / 2, top + 1, w, size - 2);
  }
  write(text, x, top + size / 2 + .5, ink, fate ? "left" : "center", `${px}px`);
}
