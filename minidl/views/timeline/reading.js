// The page's words and its columns of numbers.

let words = JSON.parse($("words").textContent);
const TYPES = {u1: Uint8Array, i1: Int8Array, b1: Uint8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array,
  i4: Int32Array, f8: Float64Array, i8: BigInt64Array};
let col = {};

async function read(about, base64) {
  let bytes = bytesOf(base64);
  if (about.compressed) bytes = await unpacked(bytes);
  return Object.fromEntries(about.columns.map(([name, type, offset, length]) => [name, new TYPES[type](bytes.buffer, offset, length)]));
}

function added(steps) {
  const out = new Float64Array(steps.length);
  for (let i = 0, at = 0; i < out.length; i++) out[i] = at += Number(steps[i]);
  return out;
}
