// Header and legend.

function atHeadline() {  // the place that the title is about
  const {bar: at, begin: from, end: until} = words.headline;
  if (at < 0) return words.live ? now() : showAll();
  const pad = (until - from) * .01;
  show(from - pad, until + pad);
  choose(null);
  bringCulprit();
  pursue("headline");
  redraw();
}

function bringCulprit() {  // one of many alike needs no zoom: all are framed
  const culprit = bar(words.headline.bar);
  if (!words.framed || words.framed.alone) return bringIntoView(culprit);
  reveal(culprit);
  scrollTo(culprit);
}

const SAID = 3;  // lines of evidence that are open: below them stands what a reader goes to
function said() {  // what the headline is said from
  const {evidence, bar: at} = words.headline, open = evidence.length > SAID + 1 ? SAID : evidence.length, more = evidence.slice(open);
  const list = texts => make("ul", null, ...texts.map(text => make("li", text)));
  return [...(open ? [list(evidence.slice(0, open))] : []), ...(more.length ? [make("details", null, make("summary", `${more.length} more`), list(more))] : []),
    ...(at >= 0 ? [styled("div", "row", null, button("show it", atHeadline), button("select it", () => choose(bar(at))))] : [])];
}

function around() {  // all that is written around the timeline
  chooseLoaders();
  $("headline").textContent = words.headline.sentence;
  $("headline").classList.toggle("wrong", words.headline.wrong);
  $("next").hidden = !words.headline.next;
  $("next").replaceChildren(make("b", "next step: "), words.headline.next);
  $("title").textContent = $("title").title = words.title;
  $("count").textContent = `${words.events.toLocaleString("en")} events, ${begin.length.toLocaleString("en")} bars, ${duration(words.last - words.begin)}`;
  const open = openBars();
  $("open").hidden = !open.length || goesOn() && !words.headline.wrong;
  $("open").textContent = open.length ? `${open.length} not ended` : "";
  $("problems").hidden = !words.problems.length;
  if (words.problems.length) {
    $("problems").firstElementChild.textContent = `Missing from the trace: ${words.problems[0]}` + (words.problems.length > 1 ? ` (and ${words.problems.length - 1} more)` : "");
    $("problems").lastElementChild.replaceChildren(...words.problems.map(p => make("li", p)));
  }
  $("perfetto").hidden = !words.perfetto;
  if (words.live) sayLive();
  drawLegend($("legend"), words.legend);
  inLegend = "";
}

let inLegend = "";
function paleLegend() {  // signs of steps that are not in view
  const now = [...inView].sort().join();
  if (now === inLegend) return;
  inLegend = now;
  const labels = new Set([...inView].map(code => kinds[code].label));
  words.legend.forEach(({label, pattern}, n) => $("legend").children[n].classList.toggle("away", pattern === "work" && !labels.has(label)));
}

function wire() {
  $("dataloader").addEventListener("change", () => { showLoader($("dataloader").value); choose(null); find($("query").value); });
  $("headline").addEventListener("click", atHeadline);
  $("headline").addEventListener("keydown", event => { if (event.key === "Enter") atHeadline(); });
  $("open").addEventListener("click", () => {
    $("query").value = "open"; find("open");
    matchAt = -1;
    go(1);
  });
  $("follow").addEventListener("click", now);
  for (const event of ["pointerdown", "focus"]) $("perfetto").addEventListener(event, () => { $("perfetto").href = perfettoHere(); });
}
