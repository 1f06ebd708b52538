// The data of the page: arrays over tokens, bit-exact where tokens are counted.

const KINDS = { F32: Float32Array, U32: Uint32Array, U16: Uint16Array, U8: Uint8Array };

/** The arrays in one of the page's data blocks: base64 of a deflated safetensors file. */
async function unpack(id) {
  const element = document.getElementById(id);
  const packed = atob(element.textContent);
  element.remove();
  const bytes = new Uint8Array(packed.length);
  for (let index = 0; index < bytes.length; index++) bytes[index] = packed.charCodeAt(index);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(inflated).arrayBuffer();
  const header = Number(new DataView(buffer).getBigUint64(0, true));
  const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, header)));
  return Object.fromEntries(Object.entries(entries).map(([name, { dtype, data_offsets: [start, stop] }]) => {
    const kind = KINDS[dtype];
    return [name, new kind(buffer, 8 + header + start, (stop - start) / kind.BYTES_PER_ELEMENT)];
  }));
}

const decode = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);

/** Starts and stops of spans from the distances of their starts and their lengths. */
function spans(advance, length) {
  const start = new Uint32Array(advance.length), stop = new Uint32Array(advance.length);
  for (let token = 0, at = 0; token < advance.length; token++) {
    start[token] = at += advance[token];
    stop[token] = at + length[token];
  }
  return { start, stop };
}

async function readScores() {
  const arrays = await unpack("scores");
  const facts = JSON.parse(decode(arrays.facts));
  const lsd = new Float32Array(arrays.long.length);  // the difference of two float32, rounded to float32, as in torch
  for (let token = 0; token < lsd.length; token++) lsd[token] = arrays.long[token] - arrays.short[token];
  const data = {
    ...facts, text: decode(arrays.text), count: lsd.length, vocabulary: JSON.parse(decode(arrays.vocabulary)),
    token: arrays.token, long: arrays.long, short: arrays.short, lsd, ...spans(arrays.advance, arrays.length),
  };
  data.shown = joinLines(data.text);
  // An infinite threshold is null, because JSON has no infinity.
  data.beta = data.beta ?? -Infinity;
  data.judged = facts.models.map((model, number) => ({
    ...model, long: arrays[`model_${number}_long`], ...spans(arrays[`model_${number}_advance`], arrays[`model_${number}_length`]),
  }));
  return data;
}

/** The alternatives at a token, likeliest first, with their probabilities; null where there are none. */
function alternativesOf(data, arrays, context, token) {
  const k = data.alternatives;
  const short = context === "short" && token >= data.first_short;
  const row = short ? token - data.first_short : token;
  if (token < data.unscored) return null;
  const numbers = arrays[short ? "short_token" : "long_token"], steps = arrays[short ? "short_steps" : "long_steps"];
  return Array.from({ length: k }, (_, rank) => {
    const number = numbers[row * k + rank], own = number === data.token[token];
    // That of the token itself is known exactly.
    const logLikelihood = own ? data[context][token] : -steps[row * k + rank] / data.steps_per_nat;
    return { text: data.vocabulary[number], probability: Math.exp(logLikelihood), own };
  });
}
