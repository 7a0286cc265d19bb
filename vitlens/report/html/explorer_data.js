// The weights of the explorer from the packed bytes of the page (packing.py), and the numbers and names of tokens.

function makeReader(data) {
  const special = data.special.length;

  async function unpack(image) {
    if (!image.weights) return null;
    const { layers, heads, queries, keys, levels, block } = image.weights;
    const maps = layers * Math.max(heads, 1);
    const rows = special + queries[0] * queries[1], columns = special + keys[0] * keys[1];
    const content = await inflated(bytesOf(document.getElementById(block).textContent));
    const maxima = new Float32Array(content.slice(0, maps * rows * 8).buffer);
    const square = Float32Array.from({ length: 256 }, (_, byte) => (byte / levels) ** 2);
    return { layers, heads: Math.max(heads, 1), byHead: heads > 0, queries, keys, rows, columns, maxima, square,
      bytes: content.subarray(maps * rows * 8) };
  }

  // the map of one head (or their mean, head = null): values over patches, and of the special tokens
  function mapOf(tensor, layer, head, token, to) {
    const heads = head === null ? [...Array(tensor.heads).keys()] : [Math.min(head, tensor.heads - 1)];
    const size = to ? tensor.rows : tensor.columns, row = new Float32Array(size);
    const place = placeOf(token, to ? tensor.keys : tensor.queries);
    for (const each of heads) {
      const first = (layer * tensor.heads + each) * tensor.rows;
      if (to) {
        for (let query = 0; query < size; query++) {
          row[query] += tensor.maxima[2 * (first + query) + (place < special ? 0 : 1)] *
            tensor.square[tensor.bytes[(first + query) * tensor.columns + place]];
        }
      } else {
        const most = 2 * (first + place), start = (first + place) * tensor.columns;
        for (let key = 0; key < size; key++) {
          row[key] += tensor.maxima[most + (key < special ? 0 : 1)] * tensor.square[tensor.bytes[start + key]];
        }
      }
    }
    if (heads.length > 1) for (let index = 0; index < size; index++) row[index] /= heads.length;
    return { values: row.subarray(special), special: row.subarray(0, special), grid: to ? tensor.queries : tensor.keys };
  }

  function unpackRollout(rollout) {
    if (rollout.bytes) return;
    const content = bytesOf(rollout.data);
    rollout.maxima = new Float32Array(content.slice(0, rollout.layers * 8).buffer);
    rollout.bytes = content.subarray(rollout.layers * 8);
  }

  // the map of the rollout up to a layer
  function rolloutOf(rollout, layer) {
    const { maxima, bytes, levels } = rollout;
    const columns = special + data.grid[0] * data.grid[1];
    const row = Float32Array.from({ length: columns }, (_, key) =>
      maxima[2 * layer + (key < special ? 0 : 1)] * (bytes[layer * columns + key] / levels) ** 2);
    return { values: row.subarray(special), special: row.subarray(0, special), grid: data.grid };
  }

  // a chosen token's place among the rows or columns: blocks of patches where they were pooled
  function placeOf(token, grid) {
    if (token.special !== undefined) return token.special;
    const row = Math.floor((token.row * grid[0]) / data.grid[0]), column = Math.floor((token.column * grid[1]) / data.grid[1]);
    return special + row * grid[1] + column;
  }

  // tokens by number: the special ones, then the patches row by row
  const numberOfToken = (token) =>
    token.special !== undefined ? token.special : special + token.row * data.grid[1] + token.column;

  function tokenAt(place) {
    if (place < special) return { special: place };
    const patch = place - special;
    return { row: Math.floor(patch / data.grid[1]), column: patch % data.grid[1] };
  }

  const nameOfToken = (token) =>
    token.special !== undefined ? data.special[token.special] : `row ${token.row}, column ${token.column}`;

  return { unpack, unpackRollout, mapOf, rolloutOf, numberOfToken, tokenAt, nameOfToken };
}
