// Numbers in words.

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]], MINUTE = [60e9, "min"];
const unitOf = ns => ns >= 10 * MINUTE[0] ? MINUTE : UNITS.find(([f]) => ns >= f) || UNITS[3];  // as `words.unit_of`

// As `minidl.tracefile.words.duration`.
function duration(ns) {
  const digits = value => value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0), value = Math.abs(ns), sign = ns < 0 ? "-" : "";
  for (const [size, unit] of [...UNITS].reverse())
    if (Number(digits(value / size)) < (unit === "s" ? 600 : 1000)) return `${sign}${unit === "ns" ? Math.round(value) : digits(value / size)} ${unit}`;
  return `${sign}${digits(value / 60e9)} min`;
}

// As `minidl.tracefile.words.percent`.
function percent(share) { return share > 0 && share < .01 ? "<1%" : `${Math.round(100 * share)}%`; }

function moment(ns) {
  const [s, rest] = [Math.trunc(ns / 1e9), Math.abs(Math.round(ns % 1e9))];
  return `${s}.${String(rest).padStart(9, "0").replace(/(\d{3})(?=\d)/g, "$1\u2009")} s`;
}

function shortBytes(n) {
  if (n < 1024) return `${n} B`;
  const power = Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toPrecision(3)} ${"B KiB MiB GiB TiB".split(" ")[power]}`;
}

const bytes = n => n < 1024 ? shortBytes(n) : `${shortBytes(n)} (${n.toLocaleString("en")} B)`;

function fieldText(field, value) {
  if (field.values) return field.values[value] ?? String(value);
  if (field.unit === "string") return words.texts[Number(value)] ?? "";
  if (field.unit === "B") return bytes(Number(value));
  if (field.unit === "ns") return duration(Number(value));
  if (field.name === "simulated") return Number(value) ? "yes" : "no";
  return field.unit ? `${value} ${field.unit}` : String(value);
}
