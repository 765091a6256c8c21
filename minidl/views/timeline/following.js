// A run that goes on: the same page, again and again.

const SHOWN = 10e9, PATIENCE = 5;  // ns of the window at first; requests that may fail
let pursued = "", span = SHOWN, looks = 0;  // what the view keeps up with: "edge" = the latest events, "headline" = its place, "" = nothing

const goesOn = () => words.live && !words.live.over;

function pursue(what) {
  if (!goesOn()) what = "";
  pursued = what;
  if (what === "edge") span = v0 <= words.begin ? Math.max(SHOWN, v1 - v0) : v1 - v0;
  $("follow").hidden = !goesOn() || Boolean(what);
}

function now() {  // what the title is about, if that is one place, or else the latest events
  if (words.headline.bar >= 0 && pursued !== "headline") return atHeadline();
  show(Math.max(words.begin, words.end - SHOWN), words.end + (words.end - words.begin) * .004);
}

function sayLive() {
  const {state, over, lost, since, ended} = words.live;
  const part = since ? `; shown since ${duration(since * 1e9)}` : "";
  $("live").hidden = false;
  $("live").classList.toggle("on", !over);
  $("live").classList.toggle("alarm", lost);
  $("live").textContent = over ? [state, ended].filter(Boolean).join("; ") : `live: ${state}${part}`;
  document.title = `${words.headline.sentence} - ${words.title}`;
}

function remembered() {  // what is selected, in words that the next answer knows too
  const key = chosen && ["code", "tid"].map(name => valueOf(chosen, name)).concat(timesOf(chosen)[0]);
  return {key, type: chosen?.type, batches: batches.map(i => ["epoch", "task", "put"].map(name => num(`batch.${name}`, i)))};
}

function recall({key, type, batches: wanted}) {
  chosen = null; hovered = null;
  const times = type && kept[type].begin;
  for (let at = 0; key && at < times.length && !chosen; at++)
    if (times[at] === key[2] && num(`${type}.code`, at) === key[0] && num(`${type}.tid`, at) === key[1]) chosen = {type, at};
  batches = wanted.map(([epoch, task, put]) => {
    for (let i = 0; i < stopsOf.length - 1; i++)
      if (num("batch.put", i) === put && num("batch.task", i) === task && num("batch.epoch", i) === epoch) return i;
    return -1;
  }).filter(i => i >= 0);
  if ($("query").value) { const was = matchAt; find($("query").value); matchAt = Math.min(was, matches.length - 1); }
}

function keepUp(before) {  // after an answer; before: the title's kind until now
  const {bar: at, begin: from, end: until, kind} = words.headline, pad = (words.end - words.begin) * .004;
  if (pursued && at >= 0 && (pursued === "headline" || kind !== before)) {
    [v0, v1] = [from - (until - from) * .01, until + (until - from) * .01];
    if (kind !== before) bringCulprit();
    pursue("headline");
  } else if (pursued) {
    v1 = words.end + pad;
    v0 = Math.max(v1 - span, words.begin - pad);
    pursue("edge");
  }
  clampView();
}

async function renew(answer) {
  const fresh = await read(answer.words, answer.numbers), selected = remembered(), kind = words.headline.kind;
  [words, col] = [answer.words, fresh];
  build();
  recall(selected);
  around();
  keepUp(kind);
  if (words.live.over) pursue("");
  empty();
  details();
  resize();
  Object.assign(root.dataset, {looks: ++looks, kind: words.headline.kind});
}

async function follow() {
  for (let failed = 0; goesOn();) {
    await new Promise(done => setTimeout(done, words.live.every));
    try {
      const response = await fetch("live", {cache: "no-store"});
      if (!response.ok) throw new Error(await response.text());
      await renew(await response.json());
      failed = 0;
    } catch (error) {
      if (++failed < PATIENCE) continue;
      words.live = {...words.live, over: true, lost: true, state: `no longer followed, shown as of the last look: ${error.message}`, ended: ""};
      pursue("");
      sayLive();
    }
  }
}
