// The start, once all parts are there.

function perfettoHere() {  // the address of what is on the screen now, in Perfetto
  const place = {begin: Math.max(0, Math.floor(v0)), end: Math.ceil(v1)};
  if (chosen && isBar(chosen)) {
    place.ts = begin[chosen.at];
    if (!faded(chosen.at)) place.dur = end[chosen.at] - begin[chosen.at];
  }
  return `${words.perfetto}?${new URLSearchParams(place)}`;
}

async function start() {
  try {
    col = await read(words, $("numbers").textContent);
    $("numbers").remove();
    build();
  } catch (error) {
    $("wait").textContent = `The trace cannot be shown: ${error.message}`;
    throw error;
  }
  collapseMany();
  retheme();
  around();
  wire();
  details();
  new ResizeObserver(resize).observe(scroller);
  resize();
  atHeadline();
  openedCollapsed = collapsedNow();
  opened = addressNow();
  goToAddress();
  if (words.perfetto) $("perfetto").href = perfettoHere();
  draw();  // at once: a tab in the background gets no animation frame
  empty();
  Object.assign(root.dataset, {bars: begin.length, marks: marks.length, lanes: lanes.length, batches: stopsOf.length - 1});
  if (words.live) follow();
}

function empty() {
  $("wait").hidden = words.events > 0;
  $("wait").textContent = goesOn() ? "No event is recorded yet." : "The trace has no events.";
}
start();
