// The address keeps the moment, the range, the selection, the lanes: a link opens the same view.

const seconds = ns => (Math.round(ns) / 1e9).toFixed(9).replace(/\.?0+$/, "");
const collapsedNow = () => [...collapsed].map(key => key.replace(" ", "-")).sort().join(",");
let addressing = 0, opened = "", openedCollapsed = "";  // the view that the page opens with has no address of its own

function addressNow() {
  const parts = {begin: seconds(v0), end: seconds(v1)};
  if (range) parts.range = rangeOf().map(seconds).join("-");
  if (chosen) parts.selected = [chosen.type, valueOf(chosen, "code"), valueOf(chosen, "tid"), timesOf(chosen)[0]].join(".");
  if (only) parts.dataloader = only;
  if (filter) parts.lanes = filter;
  if (collapsedNow() !== openedCollapsed) parts.collapsed = collapsedNow();
  return `#${new URLSearchParams(parts)}`;
}

function keepAddress() {  // after a moment without a change
  if (framed || !opened) return;
  clearTimeout(addressing);
  addressing = setTimeout(() => {
    const address = addressNow();
    if (pursued || address === opened) { if (location.hash) history.replaceState(null, "", location.pathname + location.search); }
    else if (address !== location.hash) history.replaceState(null, "", address);
  }, 200);
}

function goToAddress() {
  const parts = new URLSearchParams(location.hash.slice(1)), ns = text => Math.round(Number(text) * 1e9);
  if (!(ns(parts.get("end")) > ns(parts.get("begin")))) return;
  const [type, ...key] = (parts.get("selected") || "").split("."), ends = (parts.get("range") || "").split("-").map(ns);
  range = ends.length === 2 && ends.every(Number.isFinite) ? {anchor: inTrace(ends[0]), head: inTrace(ends[1])} : null;
  only = $("dataloader").value = words.dataloaders.some(([name]) => name === parts.get("dataloader")) ? parts.get("dataloader") : "";
  filter = $("lanes").value = parts.get("lanes") || "";
  collapsed = new Set((parts.get("collapsed") ?? openedCollapsed).split(",").filter(Boolean).map(key => key.replace("-", " ")));
  rearrange();
  recall({type: type in kept && key.length === 3 ? type : undefined, key: key.map(Number), batches: []});
  if (chosen) reveal(chosen);
  show(ns(parts.get("begin")), ns(parts.get("end")));
  choose(chosen, false);
  if (range) selectRange(range.anchor, range.head);
  if (chosen) scrollTo(chosen);
}

window.addEventListener("hashchange", goToAddress);
