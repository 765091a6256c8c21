// Pointer and keys.

const framed = window.self !== window.top;
let drag = null;

canvas.addEventListener("wheel", event => {
  if (event.offsetX < gutter) return;
  if (framed && document.activeElement !== canvas && !event.ctrlKey) return;  // the page around scrolls until this one is clicked
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 18 : event.deltaMode === 2 ? 300 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) * unit / (wide - gutter));
  else zoom(Math.exp(Math.max(-300, Math.min(300, event.deltaY * unit)) * .0022), event.offsetX);
}, {passive: false});

canvas.addEventListener("pointerdown", event => {
  if (event.button) return;
  canvas.focus({preventScroll: true});
  canvas.setPointerCapture(event.pointerId);
  const ranges = event.offsetX >= gutter && (event.offsetY < AXIS || event.shiftKey) ? tOf(event.offsetX) : null;
  drag = {x: event.clientX, y: event.clientY, v0, v1, top: scroller.scrollTop, moved: false, ranges};
});
canvas.addEventListener("pointermove", event => {
  const area = canvas.getBoundingClientRect();
  pointer = {x: event.clientX - area.left, y: event.clientY - area.top};
  if (drag) {
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
    if (drag.moved && drag.ranges !== null) selectRange(drag.ranges, tOf(pointer.x), false);
    else if (drag.moved) {
      canvas.classList.add("dragging");
      const by = dx / (wide - gutter) * (drag.v1 - drag.v0);
      scroller.scrollTop = drag.top - dy;
      show(drag.v0 - by, drag.v1 - by);
    }
    return;
  }
  const what = at(pointer.x, pointer.y);
  if (!same(what, hovered)) hovered = what;
  canvas.style.cursor = what ? "pointer" : pointer.x < gutter ? nameAt(pointer.y) ? "pointer" : "" : pointer.y < AXIS ? "col-resize" : "";
  tip(what, pointer.x, pointer.y);
  redraw(false);
});
canvas.addEventListener("pointerup", event => {
  canvas.classList.remove("dragging");
  const clicked = drag && !drag.moved, onAxis = event.offsetY < AXIS;
  drag = null;
  if (!clicked || onAxis) return;
  hideTip();
  if (event.offsetX < gutter) return clickName(event.offsetY);
  const what = at(event.offsetX, event.offsetY);
  if (event.shiftKey && what) { chosen = what; addBatch(); } else choose(what, false);
});
canvas.addEventListener("pointerleave", () => { pointer = null; hideTip(); redraw(false); });
canvas.addEventListener("dblclick", zoomToChosen);
scroller.addEventListener("scroll", () => redraw());

const KEYS = {
  ArrowLeft: () => pan(-.15), a: () => pan(-.15), ArrowRight: () => pan(.15), d: () => pan(.15),
  ArrowUp: () => { scroller.scrollTop -= 40; }, ArrowDown: () => { scroller.scrollTop += 40; },
  PageUp: () => { scroller.scrollTop -= high * .7; }, PageDown: () => { scroller.scrollTop += high * .7; },
  "+": () => zoom(.7), "=": () => zoom(.7), w: () => zoom(.7), "-": () => zoom(1 / .7), s: () => zoom(1 / .7),
  f: atHeadline, l: now, 0: showAll, Home: showAll, "[": () => step(-1), "]": () => step(1), "{": () => stepRow(-1), "}": () => stepRow(1),
  Enter: () => chosen || !range ? zoomToChosen() : zoomToRange(), b: addBatch, ".": () => go(1), ",": () => go(-1), n: () => goStall(1), N: () => goStall(-1), o: () => nextSlow(1), O: () => nextSlow(-1), c: toggleHere, C: () => toggleAll(), v: () => $("lanes").focus(), "/": () => $("query").focus(), "?": keys,
  Escape: () => chosen || !range ? choose(null) : clearRange(),
  r: rangeHere, S: savePart, "Shift+ArrowLeft": () => extendRange(-.02), "Shift+ArrowRight": () => extendRange(.02),
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inside = event.target === canvas || event.target === document.body;
  const act = event.shiftKey && KEYS[`Shift+${event.key}`] || KEYS[event.key] || KEYS[event.key.toLowerCase()];
  if (inside && act) { event.preventDefault(); act(); }
});

$("all").addEventListener("click", showAll);
$("help").addEventListener("click", keys);
$("close").addEventListener("click", () => { summed = false; range = null; choose(null); });
$("summary").addEventListener("click", () => { summed = true; range = null; choose(null); });
themed(retheme);
