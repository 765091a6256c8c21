// Which lanes stand on the page, and how high: of one DataLoader, those of the filter, without the parts of collapsed processes.

const CLOSED = .62, LEAST = 16, MANY = 40;  // height of a collapsed lane, rows; least height of a row, pixels; more workers than that are collapsed at first
let only = "", filter = "", collapsed = new Set();

const processKey = lane => `${lane.slot} ${lane.worker}`;  // a worker, or the process of a loader
const leads = lane => ["worker", "loader", "consumer", "device"].includes(lane.kind);  // stays if its process is collapsed
const shownSlots = () => words.slots.map((_, slot) => slot).filter(slot => lanes.some(lane => lane.slot === slot && !lane.out));

// out: not wanted, and counted nowhere; hidden: not drawn.
function arrange() {
  const wanted = words.dataloaders.find(([name]) => name === only)?.[1], fits = filterOf(filter);
  let bottom = 0, above = null;
  built++;
  lanes.forEach((lane, i) => {
    const before = lanes[i - 1];
    lane.out = Boolean(wanted) && !wanted.includes(lane.slot) || !fits(lane);
    lane.closed = collapsed.has(processKey(lane));
    lane.hidden = lane.out || lane.closed && !leads(lane);
    lane.heights = lane.closed ? lane.full.map((_, row) => row ? 0 : CLOSED) : lane.full;
    lane.gap = before?.slot === lane.slot ? lane.at - before.at - sum(before.full) : 0;
    lane.top = -1e6;
    if (lane.hidden) return;
    const first = above?.slot !== lane.slot, title = words.slots.length > 1 ? 1.1 : 0;
    lane.top = bottom + (first ? title + (above ? .5 : 0) : lane.closed && above.closed ? .12 : lane.gap || .45);
    bottom = lane.top + tall(lane);
    above = lane;
  });
}

const sum = heights => heights.reduce((a, b) => a + b, 0);

function filterOf(text) {  // "rank 1 worker 3-5, loader": a comma is "or"
  const choices = text.toLowerCase().split(",").map(choice => choice.trim()).filter(Boolean).map(choice => {
    const tests = [], rest = choice.replace(/\b(rank|worker|r|w)\s*(\d+)(?:\s*-\s*(\d+))?/g, (_, key, from, to) => {
      const inside = n => n >= Number(from) && n <= Number(to ?? from);
      tests.push(key[0] === "w" ? lane => inside(lane.worker) : lane => inside(Number(words.slots[lane.slot].match(/rank (\d+)/)?.[1] ?? -1)));
      return " ";
    });
    tests.push(...rest.split(/\s+/).filter(Boolean).map(word => lane => `${lane.title} ${words.slots[lane.slot]}`.toLowerCase().includes(word)));
    return lane => tests.every(test => test(lane));
  });
  return lane => !choices.length || choices.some(choice => choice(lane));
}

function setFilter(text) {
  filter = $("lanes").value = text;
  rearrange();
  if (lanes.every(lane => lane.out)) say(`No lane is called "${text}": ${[...new Set(lanes.map(lane => lane.title.replace(/ \d+$/, "")))].join(", ")}.`);
}

function rearrange() { arrange(); resize(); details(); find($("query").value); }

function toggle(keys) {  // collapses these processes, or expands them if all are collapsed
  const expand = keys.every(key => collapsed.has(key));
  for (const key of keys) if (expand) collapsed.delete(key); else collapsed.add(key);
  rearrange();
}

function toggleHere() {  // the process of what is selected or pointed at
  const what = chosen || hovered;
  if (what) toggle([processKey(laneOf(what))]); else toggleAll();
}

function toggleAll(slot = -1) { toggle([...new Set(lanes.filter(lane => !lane.out && lane.worker >= 0 && (slot < 0 || lane.slot === slot)).map(processKey))]); }

function nameAt(y) {  // the lane whose name is at y, or the slot whose title is
  const lane = lanes.find(one => !one.hidden && y >= yOf(one.top) - 1 && y <= yOf(one.top) + tall(one) * row + 1);
  if (lane) return {lane};
  const below = lanes.find(one => !one.hidden && y >= yOf(one.top) - 20 && y < yOf(one.top));
  return below && words.slots.length > 1 && !lanes.some(one => !one.hidden && one.slot === below.slot && one.top < below.top) ? {slot: below.slot} : null;
}

function clickName(y) {
  const named = nameAt(y);
  if (named?.lane) toggle([processKey(named.lane)]);
  else if (named) toggleAll(named.slot);
}

function reveal(what) {  // so that it is drawn
  const run = runOf(what), lane = lanes[run.lane];
  if (lane.out) { only = $("dataloader").value = ""; filter = $("lanes").value = ""; }
  if (lane.hidden || lane.closed && run.row > 0) collapsed.delete(processKey(lane));
  else if (!lane.out) return;
  arrange(); resize();
}

function collapseMany() {  // on a page with many workers, all but the one that the title is about; of two traces, so that both are seen
  const workers = lanes.filter(lane => lane.kind === "worker"), at = words.headline.bar;
  if (workers.length <= MANY && !(words.headline.kind === "compared" && units() * LEAST > scroller.clientHeight)) return;
  collapsed = new Set(workers.map(processKey));
  if (at >= 0) collapsed.delete(processKey(laneOf(bar(at))));
  arrange();
}

function showLoader(name) { only = $("dataloader").value = name; arrange(); resize(); }

function chooseLoaders() {
  const there = words.dataloaders.map(([name]) => name), box = $("dataloader");
  if (!there.includes(only)) only = "";
  if (box.options.length === there.length + 1) return;
  box.replaceChildren(...["", ...there].map(name => { const item = make("option", name || "all DataLoaders"); item.value = name; return item; }));
  box.value = only;
  box.hidden = there.length < 2;
}

$("lanes").addEventListener("input", () => setFilter($("lanes").value));
$("lanes").addEventListener("keydown", event => {
  if (event.key === "Escape") setFilter("");
  if (event.key === "Escape" || event.key === "Enter") canvas.focus();
});
