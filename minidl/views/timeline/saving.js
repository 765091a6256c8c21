// Saving a part of the page, what is in the selected range, as a page of its own.

const blank = root.cloneNode(true);  // the page as it came, for what is saved
blank.querySelector("#numbers").textContent = "";

const differences = times => times.map((t, i) => i ? t - times[i - 1] : t);

function keptRuns(all, overlaps) {  // the indices that are kept, and where the rows lie then: [...keys, first, count]
  const kept = [], rows = [];
  for (const one of all) {
    const [first, count] = one.slice(-2), from = kept.length;
    for (let i = first; i < first + count; i++) if (overlaps(i)) kept.push(i);
    if (kept.length > from) rows.push([...one.slice(0, -2), from, kept.length - from]);
  }
  return [kept, rows];
}

function part(from, until) {  // [words, columns] of what overlaps the range
  const [bars, barRows] = keptRuns(words.runs, i => begin[i] <= until && end[i] >= from);
  const [points, pointRows] = keptRuns(words.markRuns, i => marks[i] >= from && marks[i] <= until);
  const used = new Set([...bars.map(i => num("bar.batch", i)), ...points.map(i => num("mark.batch", i))]);
  const sent = [...col["batch.put"].keys()].filter(i => used.has(i)), placeOf = new Map(sent.map((old, at) => [old, at]));
  const stops = [...col["stop.batch"].keys()].filter(i => used.has(num("stop.batch", i))), of = {bar: bars, mark: points, batch: sent, stop: stops};
  const columns = {}, take = (name, indices) => col[name].constructor.from(indices, i => col[name][i]);
  for (const name of Object.keys(col)) if (of[name.split(".")[0]]) columns[name] = take(name, of[name.split(".")[0]]);
  for (const name of ["bar.batch", "mark.batch", "stop.batch"]) columns[name] = Int32Array.from(columns[name], old => placeOf.get(Number(old)) ?? -1);
  columns["bar.begin"] = Float64Array.from(differences(bars.map(i => begin[i])));
  columns["mark.time"] = Float64Array.from(differences(points.map(i => marks[i])));
  counters.forEach(({times, values}, n) => {
    const first = Math.max(0, firstAfter(times, 0, times.length, from) - 1), last = firstAfter(times, 0, times.length, until);
    columns[`counter.${n}.time`] = Float64Array.from(differences([...times.slice(first, last)]));
    columns[`counter.${n}.value`] = values.slice(first, last);
  });
  return [partWords(from, until, bars, barRows, points, pointRows), columns];
}

function partWords(from, until, bars, runs, points, markRuns) {  // the words, with the new indices
  const barAt = new Map(bars.map((old, at) => [old, at])), markAt = new Map(points.map((old, at) => [old, at]));
  const where = [from, until].map(ns => `${(ns / 1e9).toFixed(3)} s`).join(" to "), {headline, framed} = words, isFramed = framed && framed.begin < until && framed.end > from;
  return {
    ...words, runs, markRuns, begin: from, end: until, last: Math.min(words.last, until), live: null, perfetto: "", title: `${words.title}, ${where}`,
    events: 2 * bars.length + points.length,
    headline: {...headline, bar: barAt.get(headline.bar) ?? -1, begin: from, end: until},
    framed: isFramed ? {...framed, bar: barAt.get(framed.bar) ?? -1} : null,
    cause: isFramed ? words.cause : null,
    unended: words.unended.filter(i => barAt.has(i)).map(i => barAt.get(i)),
    alarms: Object.fromEntries(Object.entries(words.alarms).filter(([i]) => markAt.has(Number(i))).map(([i, text]) => [markAt.get(Number(i)), text])),
    deaths: words.deaths.filter(({time}) => time >= from && time <= until),
    facts: [["part", `${where} of ${words.title}; the title is about the whole run`], ...words.facts],
  };
}

async function packedPart([about, columns]) {  // as `page.packed`
  const layout = [], pieces = [], typeOf = column => Object.keys(TYPES).find(type => TYPES[type] === column.constructor);
  let offset = 0;
  for (const [name, column] of Object.entries(columns)) {
    const size = column.byteLength, space = -size & 7;
    layout.push([name, typeOf(column), offset, column.length]);
    pieces.push(new Uint8Array(column.buffer, column.byteOffset, size), new Uint8Array(space));
    offset += size + space;
  }
  const stream = new Blob(pieces).stream().pipeThrough(new CompressionStream("gzip"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer()), chunks = [];
  for (let i = 0; i < data.length; i += 32768) chunks.push(String.fromCharCode(...data.subarray(i, i + 32768)));
  return [{...about, columns: layout, compressed: true}, btoa(chunks.join(""))];
}

async function savePart() {
  if (framed) return say("A page within another page cannot save a file: open it on its own.");
  const [from, until] = (range ? rangeOf() : [v0, v1].map(inTrace)).map(Math.round), [about, numbers] = await packedPart(part(from, until));
  blank.querySelector("title").textContent = about.title;
  blank.querySelector("#words").textContent = JSON.stringify(about).replace(/</g, "\\u003c");  // as jinja2's tojson: no markup
  blank.querySelector("#numbers").textContent = numbers;
  const link = make("a"), file = new Blob([`<!doctype html>\n${blank.outerHTML}`], {type: "text/html"});
  link.href = URL.createObjectURL(file);
  link.download = `${words.title.replace(/[^\w.-]+/g, "-")}-${seconds(from)}-${seconds(until)}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`Saved as ${link.download} (${shortBytes(file.size)}).`);
}

function commandOfPart() {
  const path = words.facts.find(([name]) => name === "trace")?.[1] ?? words.title, [from, until] = rangeOf();
  return `minidl timeline ${/[^\w./-]/.test(path) ? `'${path}'` : path} --since ${seconds(from)} --until ${seconds(until)} -o part.html`;
}
