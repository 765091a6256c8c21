// Events, failures and deaths above their lanes, with labels that cover no other label.

function drawMarks(run, bottom) {
  const y = yOf(lanes[run.lane].top);
  if (lanes[run.lane].closed || y < AXIS || y - MARK > bottom) return;
  const code = col["mark.code"], first = firstAfter(marks, run.first, run.count, v0 - 6 / scale());
  const last = firstAfter(marks, run.first, run.count, v1);
  if (last - first > (wide - gutter) / 3) drawDenseMarks(run, first, last, y);
  else for (let i = first; i < last; i++) {
    const x = xOf(marks[i]);
    pen.fillStyle = kinds[code[i]].colour;
    pen.beginPath(); pen.moveTo(x - 2.5, y - MARK); pen.lineTo(x + 2.5, y - MARK); pen.lineTo(x, y - .5); pen.fill();
  }
}

function drawDenseMarks(run, first, last, y) {
  const code = col["mark.code"], k = scale() * dots;
  strip.start();
  const groups = groupsOf(run, k, kept.mark, i => [rgb(kinds[code[i]].colour), .06]);
  for (let i = first, taken = 0; i < last; i += taken || 1)
    if (!(groups && (taken = addGroup(groups, run, i, scale(), 1)))) strip.add(Math.floor((marks[i] - v0) * k), .06, rgb(kinds[code[i]].colour), 1);
  strip.draw(y - MARK + 1, MARK - 2, .12);
}

// Labels beside marks cover no other label: each has its place on the mark's right or left, or none.
let taken = [];

function label(text, x, y, colour, font) {
  const px = font.match(/\d+/g).pop(), w = widthOf(text, font.startsWith("600") ? `600 ${px}` : Number(px)) + 8;
  for (const left of [x + 9, x - 9 - w]) {
    if (left < gutter || left + w > wide || taken.some(t => left < t.right && left + w > t.left && Math.abs(y - t.y) < 13)) continue;
    taken.push({left, right: left + w, y});
    pen.fillStyle = look.paper; pen.globalAlpha = .88; pen.fillRect(left, y - 7, w, 14); pen.globalAlpha = 1;
    write(text, left + 4, y, colour, "left", font);
    return;
  }
}

function drawAlarms(bottom) {
  for (const run of markRuns) {
    const y = yOf(lanes[run.lane].top) - 4;
    if (y < AXIS - MARK || y > bottom) continue;
    for (const i of alarmMarks) {
      const x = xOf(marks[i]);
      if (i < run.first || i >= run.first + run.count || x < gutter || x > wide) continue;
      write("✕", x, y, weak(i) ? look.faint : look.alarm, "center", weak(i) ? "11px" : "bold 13px");
      if (words.alarms[i]) label(words.alarms[i], x, y - 2, weak(i) ? look.faint : look.alarm, "11px");
    }
  }
}

const weak = i => col["mark.weak"][i];  // of another actor, which this one only found

function drawDeaths(bottom) {
  for (const {lane, time, words: text} of words.deaths) {
    const x = xOf(time), y = yOf(lanes[lane].top) - 2;
    if (y < AXIS - MARK || y > bottom || x < gutter || x > wide) continue;
    label(text, x, y - 5, look.alarm, "600 12px");
    write("✕", x, y, look.alarm, "center", "bold 17px");
  }
}
