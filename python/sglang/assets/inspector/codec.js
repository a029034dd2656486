// Arrays as the server sends them: little-endian int32, deflated, in base64.

/** Int32Array of an array's text. */
export async function decodeInts(text) {
  if (!text) return new Int32Array(0);
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int32Array(await new Response(inflated).arrayBuffer());
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
