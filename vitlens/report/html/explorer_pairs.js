// The score of a query and a key of one head by dimension, as in BertViz' neuron view (Vig 2019): bars of the query,
// the key and their product; the sum of the products, the score, and the weight that follows from all scores.

const MORE_THAN_STEPS = 0.03; // of the largest weight of a query: the page's steps explain less

// the vectors of one image from their bytes: the largest component of each, then high and low bytes of all steps
async function unpackVectors(block, shape) {
  const content = await inflated(bytesOf(document.getElementById(block).textContent));
  const vectors = shape.layers * shape.heads * shape.tokens;
  const size = vectors * (4 + 2 * shape.dim);
  const part = (start) => {
    const bytes = content.slice(start, start + size).buffer;
    return {
      largest: new Float32Array(bytes, 0, vectors),
      high: new Int8Array(bytes, 4 * vectors, vectors * shape.dim),
      low: new Uint8Array(bytes, (4 + shape.dim) * vectors, vectors * shape.dim),
    };
  };
  return { shape, queries: part(0), keys: part(size) };
}

function vectorOf(packed, part, layer, head, token) {
  const { heads, tokens, dim, steps } = packed.shape;
  const { largest, high, low } = packed[part];
  const vector = (layer * heads + head) * tokens + token;
  const scale = largest[vector] / steps;
  return Float64Array.from({ length: dim }, (_, at) => {
    const place = vector * dim + at;
    return (high[place] * 256 + low[place]) * scale;
  });
}

// the sums of the products of a query with every key, and the weights that follow from them
function scoresOf(packed, layer, head, query) {
  const { tokens, scales } = packed.shape;
  const values = vectorOf(packed, "queries", layer, head, query);
  const sums = Array.from({ length: tokens }, (_, token) => {
    const key = vectorOf(packed, "keys", layer, head, token);
    return values.reduce((sum, value, at) => sum + value * key[at], 0);
  });
  return { values, sums, scale: scales[layer], weights: softmax(sums, scales[layer]) };
}

// the weights of sums that are multiplied by a scale first
function softmax(sums, scale) {
  const most = Math.max(...sums);
  const powers = sums.map((sum) => Math.exp((sum - most) * scale));
  const whole = powers.reduce((sum, power) => sum + power, 0);
  return powers.map((power) => power / whole);
}

// the number of keys among which a uniform row of this entropy would divide its weight
function effectiveKeys(weights) {
  return Math.exp(-weights.reduce((sum, weight) => sum + (weight > 0 ? weight * Math.log(weight) : 0), 0));
}

// one of these scores by dimension
function pairOf(packed, scores, layer, head, key) {
  const keyValues = vectorOf(packed, "keys", layer, head, key);
  return {
    query: scores.values,
    key: keyValues,
    products: scores.values.map((value, at) => value * keyValues[at]),
    sum: scores.sums[key],
    scale: scores.scale,
    score: scores.sums[key] * scores.scale,
    weight: scores.weights[key],
    tokens: scores.weights.length,
    weightsAt: (temperature) => softmax(scores.sums, scores.scale / temperature),
    place: key,
  };
}

function makePairs() {
  // the name space as the parser knows it: no address stands in a page that fetches nothing
  const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;
  const strips = [["query", "query"], ["key", "key"], ["products", "query × key"]];
  let shown = null, order = "number", temperature = 1;

  const said = make("p", { class: "ex-detail", "aria-live": "polite" });
  const check = make("p", { class: "ex-note" });
  const note = make("p", { class: "ex-note" });
  const bars = make("div", { class: "ex-bars" });
  const pointed = make("p", { class: "ex-value", text: " " });
  const orderField = choice("Dimensions by", [["number", "number"], ["product", "product"]], order, (value) => {
    order = value;
    draw();
  });
  // the slider has the logarithm to base 2: a quarter to four times the scores' divisor
  const [temperatureField] = slider("Temperature of the softmax", { min: -2, max: 2, step: 0.25, value: 0 }, (power) => {
    temperature = 2 ** power;
    sayTemperature();
  });
  const warmed = make("p", { class: "ex-note", "aria-live": "polite" });
  const controls = make("div", { class: "ex-controls" }, orderField, temperatureField);
  const element = make("div", { class: "ex-pair" }, said, controls, warmed, bars, pointed, check, note);

  // title: of the head, the query and the key; mapWeight: the weight on the map, null where the map is averaged over
  // blocks of patches; most: the largest one of the query
  function show(pair, { title, mapWeight, most, notes }) {
    shown = pair;
    said.textContent = `${title}: the ${pair.products.length} products add up to ${number(pair.sum)}; times ` +
      `${number(pair.scale)} this is the score ${number(pair.score)}. The softmax over ${pair.tokens} keys gives ` +
      `${number(pair.weight)}${mapWeight === null ? "" : `; the map has ${number(mapWeight)}`}.`;
    const isFar = mapWeight !== null && Math.abs(pair.weight - mapWeight) > MORE_THAN_STEPS * most;
    check.textContent = isFar ? "The two weights differ by more than the steps of this page explain." : "";
    check.classList.toggle("ex-problem", isFar);
    note.textContent = notes;
    controls.hidden = bars.hidden = pointed.hidden = warmed.hidden = false;
    sayTemperature();
    draw();
  }

  // what the weight and the whole row would be if scores were divided by the temperature
  function sayTemperature() {
    if (!shown) return;
    const weights = shown.weightsAt(temperature);
    warmed.textContent = `At temperature ${number(temperature)} the weight is ${number(weights[shown.place])} and the query ` +
      `spreads over ${number(effectiveKeys(weights))} of ${shown.tokens} keys (the exponential of its entropy).`;
  }

  function refuse(reason) {
    said.textContent = reason;
    check.textContent = note.textContent = "";
    controls.hidden = bars.hidden = pointed.hidden = warmed.hidden = true;
  }

  function draw() {
    if (!shown) return;
    const dimensions = [...shown.products.keys()];
    if (order === "product") dimensions.sort((one, other) => shown.products[other] - shown.products[one]);
    bars.replaceChildren(...strips.map(([part, title]) => strip(shown[part], title, dimensions)));
    const largest = [...shown.products.keys()].sort((one, other) =>
      Math.abs(shown.products[other]) - Math.abs(shown.products[one])).slice(0, 3);
    pointed.textContent = `Largest products: ${largest.map((at) => `dimension ${at} (${signedNumber(shown.products[at])})`).join(", ")}.`;
  }

  const signedNumber = (value) => `${value > 0 ? "+" : "−"}${number(Math.abs(value))}`;

  // bars up for positive and down for negative components, to the largest of the strip
  function strip(values, title, dimensions) {
    const most = greatestOf([...values].map(Math.abs)) || 1;
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("viewBox", `0 -1 ${values.length} 2`);
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", `${title} by dimension, to ${number(most)}`);
    dimensions.forEach((dimension, place) => picture.append(barOf(values[dimension], most, dimension, place)));
    return make("div", { class: "ex-strip" },
      make("span", { text: title }), picture, make("span", { class: "ex-value", text: `± ${number(most)}` }));
  }

  function barOf(value, most, dimension, place) {
    const height = Math.abs(value) / most;
    const group = document.createElementNS(SVG, "g");
    group.append(rectangle(place, -1, 1, 2, "ex-behind"));
    group.append(rectangle(place + 0.12, value > 0 ? -height : 0, 0.76, height, value > 0 ? "ex-plus" : "ex-minus"));
    group.addEventListener("pointerenter", () => describe(dimension));
    return group;
  }

  function rectangle(x, y, width, height, name) {
    const shape = document.createElementNS(SVG, "rect");
    for (const [key, value] of Object.entries({ x, y, width, height, class: name })) shape.setAttribute(key, value);
    return shape;
  }

  function describe(dimension) {
    const [query, key, product] = [shown.query, shown.key, shown.products].map((values) => signedNumber(values[dimension]));
    pointed.textContent = `Dimension ${dimension}: query ${query}, key ${key}, product ${product}.`;
  }

  return { element, show, refuse };
}
