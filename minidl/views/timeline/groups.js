// Neighbours in a row, added up in groups of several sizes: what is much narrower than a pixel is drawn by group, so that
// the cost of a frame depends on its pixels and not on the number of bars.

const SIZES = [512, 128, 32, 8];

function groupsOf(run, k, times, weigh) {  // the largest groups that are typically narrower than half a pixel, or null
  if (run.count < 4 * SIZES[SIZES.length - 1]) return null;
  const span = times.end[run.first + run.count - 1] - times.begin[run.first], size = SIZES.find(one => span / run.count * one * k < .5);
  if (!size) return null;
  if (run.groupsFor !== look.soft) { run.groups = {}; run.groupsFor = look.soft; }
  return run.groups[size] ??= grouped(run, size, times, weigh);
}

function grouped(run, size, {begin: from, end: until}, weigh) {  // weigh(i): [colour, weight], or null if it is drawn by itself
  const n = Math.floor(run.count / size);
  const out = {size, from: new Float64Array(n), until: new Float64Array(n), sums: new Float64Array(4 * n)};
  for (let g = 0; g < n; g++) {
    let last = -Infinity, whole = true;
    for (let i = run.first + g * size; i < run.first + (g + 1) * size; i++) {
      const of = weigh(i);
      last = Math.max(last, until[i]);
      if (!of) { whole = false; continue; }
      const [[red, green, blue], weight] = of;
      out.sums[4 * g] += red * weight; out.sums[4 * g + 1] += green * weight; out.sums[4 * g + 2] += blue * weight; out.sums[4 * g + 3] += weight;
    }
    out.from[g] = from[run.first + g * size];
    out.until[g] = whole ? last : Infinity;
  }
  return out;
}

function addGroup(groups, run, i, k, factor) {  // adds the group that begins with i to the strip; how many it took, 0 = none
  const g = (i - run.first) / groups.size;
  if (!Number.isInteger(g) || g >= groups.from.length || !((groups.until[g] - groups.from[g]) * k * dots < 1)) return 0;
  const left = (groups.from[g] - v0) * k * dots, right = (groups.until[g] - v0) * k * dots, border = Math.floor(right);
  const share = left < border ? (border - left) / (right - left) : 0;  // of the pixel before, if it lies in two
  strip.addSums(border, factor * (1 - share), groups.sums, 4 * g);
  if (share) strip.addSums(border - 1, factor * share, groups.sums, 4 * g);
  return groups.size;
}
