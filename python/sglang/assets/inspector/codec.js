// Arrays as the server sends them: little-endian int32 or bytes, deflated, in base64.

async function inflate(text) {
  if (!text) return new ArrayBuffer(0);
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(inflated).arrayBuffer();
}

/** Int32Array of an array's text. */
export async function decodeInts(text) {
  return new Int32Array(await inflate(text));
}

/** Uint8Array of an array's text. */
export async function decodeBytes(text) {
  return new Uint8Array(await inflate(text));
}

/** The frames of a snapshot with typed arrays; `at` null: all pages. */
export function decodeFrames(frames) {
  return Promise.all(
    frames.map(async (frame) => {
      const [at, cells, written] = await Promise.all(
        [frame.at, frame.cells, frame.written].map(decodeInts),
      );
      return { seq: frame.seq, base: frame.base, at: frame.base === null ? null : at, cells, written };
    }),
  );
}
