// The attention explorer: plain JavaScript, no library, no request. It reads #vl-explorer (JSON) and its data blocks,
// and builds its controls inside the element [data-explorer]; all texts are set as textContent.
(() => {
  const root = document.querySelector("[data-explorer]");
  const source = document.getElementById("vl-explorer");
  if (!root || !source) return;
  performance.mark("vitlens-explorer-start");
  const data = JSON.parse(source.textContent);
  const special = data.special.length;
  const LINES = 10; // to the patches of the largest weights
  const state = { image: 0, layer: 0, head: 0, view: "head", to: false, token: null, opacity: 0.65,
    shared: false, board: "maps", label: "", face: "board", key: null, pointing: "query", lines: false };
  const decoded = new Map();
  const vectors = new Map(); // queries and keys by image, or the promise of them
  let weights = null, grey = null, playing = null, waiting = false;

  const { unpack, unpackRollout, mapOf, rolloutOf, numberOfToken, tokenAt, nameOfToken } = makeReader(data);

  // a layer has the number of its block, which differs from its position where blocks without attention lie between
  const numberOf = (layer) => (data.layers ? data.layers[layer] : layer);
  const positionOf = (number) => (data.layers ? data.layers.indexOf(number) : number);
  const numbersText = () => (data.layers ? data.layers.join(", ") : `0 to ${layerInput.max}`);

  function shownMap() {
    const image = data.images[state.image];
    if (state.view === "rollout") return rolloutOf(image.rollout, state.layer);
    if (state.view.startsWith("map:")) {
      const one = image.maps[Number(state.view.slice(4))];
      one.raw ??= bytesOf(one.data);
      return { values: Float32Array.from(one.raw, (byte) => one.low + (byte / 255) * (one.high - one.low)),
        special: [], grid: one.grid, low: one.low, high: one.high };
    }
    if (!weights) return null;
    return mapOf(weights, state.layer, state.view === "mean" ? null : state.head, state.token, state.to);
  }

  // ---- the page's parts -------------------------------------------------------------------------------------------------
  const images = make("div", { class: "ex-images", role: "radiogroup", "aria-label": "Image" });
  const views = make("div", { class: "ex-segments", role: "radiogroup", "aria-label": "View" });
  const directions = make("div", { class: "ex-segments", role: "radiogroup", "aria-label": "Direction" });
  const tokens = make("div", { class: "ex-segments", role: "radiogroup", "aria-label": "Token" });
  const faces = make("div", { class: "ex-segments", role: "radiogroup", "aria-label": "All heads" });
  const pointing = make("div", { class: "ex-segments", role: "radiogroup", "aria-label": "Pointing chooses" });
  const lastToken = special + data.grid[0] * data.grid[1] - 1;
  const [queryField, queryInput] = slider("Query", { min: 0, max: lastToken, step: 1, id: "ex-query" }, (place) => {
    setToken(tokenAt(place));
  });
  const queryText = make("output", { class: "ex-value ex-token", for: "ex-query" });
  const [keyField, keyInput] = slider("Key", { min: 0, max: lastToken, step: 1, id: "ex-key" }, (place) => {
    setKey(tokenAt(place));
  });
  const keyText = make("output", { class: "ex-value ex-token", for: "ex-key" });
  const strongest = make("button", { type: "button", text: "Strongest key", onclick: () => setKey(null) });
  const keyControls = make("div", { class: "ex-controls" }, keyField, keyText, strongest, pointing);
  const linesInput = make("input", { type: "checkbox", onchange: () => {
    state.lines = linesInput.checked;
    later();
  } });
  const linesField = make("label", { class: "ex-field" }, linesInput, make("span", { text: "Lines" }));
  const space = makeSpace({
    chosen: chooseMap,
    moved: (layers, heads) => chooseMap(state.layer + layers, state.head + heads),
  });
  const pairs = makePairs();
  const [layerField, layerInput] = slider("Layer", { min: 0, max: 0, step: 1, id: "ex-layer" }, setLayer);
  const layerText = make("output", { class: "ex-value", for: "ex-layer" });
  const [headField, headInput] = slider("Head", { min: 0, max: 0, step: 1, id: "ex-head" }, (head) => {
    setHead(state.layer, head);
  });
  const headText = make("output", { class: "ex-value", for: "ex-head" });
  const play = make("button", { type: "button", class: "ex-play", text: "▶ Play layers", onclick: toggle });
  const [opacityField] = slider("Opacity", { min: 0, max: 1, step: 0.05, value: state.opacity }, (value) => {
    state.opacity = value;
    later();
  });
  const stage = make("canvas", { class: "ex-stage", tabindex: 0, role: "img", width: 448, height: 448 });
  const bar = make("canvas", { class: "ex-bar", width: 256, height: 1, "aria-hidden": "true" });
  const ticks = make("div", { class: "ex-ticks" });
  const shares = make("div", { class: "ex-shares" });
  const facts = make("p", { class: "ex-facts" });
  const said = make("p", { class: "ex-said", "aria-live": "polite" });
  const board = make("div", { class: "ex-board", role: "grid", "aria-label": "Heads: a row each layer, a column each head" });
  const legend = make("div", { class: "ex-legend" });
  const boardFace = make("div");
  const labels = [...new Set(data.labels.flat())].filter(Boolean).sort();
  const cells = [];

  function segment(group, options, chosen, changed) {
    group.replaceChildren(...options.map(([value, text]) => make("button", {
      type: "button", role: "radio", "aria-checked": String(value === chosen), "data-value": value, text,
      onclick: () => changed(value), onkeydown: roving,
    })));
    group.hidden = options.length < 2;
  }

  function check(group, chosen) {
    for (const button of group.children) button.setAttribute("aria-checked", String(button.dataset.value === chosen));
  }

  function roving(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...event.currentTarget.parentElement.children];
    const next = all[(all.indexOf(event.currentTarget) + step + all.length) % all.length];
    next.focus();
    next.click();
  }

  function build() {
    const [notes, exactness] = [data.notes, data.exactness].map((texts) =>
      texts.map((text) => make("p", { class: "ex-note", text })));
    const boardChoices = [["maps", "maps"]];
    if (data.importance) boardChoices.push(["importance", "importance"]);
    if (labels.length) boardChoices.push(["labels", "labels"]);
    const boardFields = [
      choice("Scale", [["own", "each map its own"], ["shared", "one for all heads"]], "own", (value) => {
        state.shared = value === "shared";
        later();
      }),
    ];
    if (boardChoices.length > 1) boardFields.push(choice("Board", boardChoices, "maps", setBoard));
    if (labels.length) {
      boardFields.push(choice("Heads", [["", "all"], ...labels.map((label) => [label, label])], "", (value) => {
        state.label = value;
        later();
      }));
    }
    boardFace.append(make("div", { class: "ex-controls" }, ...boardFields), make("div", { class: "ex-scroll" }, board), legend);
    root.replaceChildren(
      ...notes, images,
      make("div", { class: "ex-controls" }, views, directions, tokens, queryField, queryText),
      make("div", { class: "ex-body" },
        make("div", { class: "ex-left" },
          stage,
          make("div", { class: "ex-scale" }, bar, ticks),
          shares, said, facts,
          make("div", { class: "ex-controls" }, layerField, layerText, headField, headText, play, opacityField, linesField),
          keyControls,
          make("p", { class: "ex-hint", text: "Point at a patch, or use the arrow keys on the image; [ and ] change " +
            "the layer, x switches between where a token looks and who looks at it." })),
        make("div", { class: "ex-right" }, make("div", { class: "ex-controls" }, faces),
          boardFace, space.element, pairs.element)),
      ...exactness);
    data.images.forEach((image, index) => {
      images.append(make("button", {
        type: "button", role: "radio", "aria-checked": String(index === 0), "data-value": String(index),
        "aria-label": image.name, title: image.name, onclick: () => choose(index), onkeydown: roving,
      }, make("img", { src: image.picture, alt: "", loading: "lazy" })));
    });
    images.hidden = data.images.length < 2;
    segment(directions, [["from", "where it looks"], ["to", "who looks at it"]], "from", (value) => setTo(value === "to"));
    segment(faces, [["board", "board"], ["space", "3-D"], ["pair", "query × key"]], state.face, setFace);
    segment(pointing, [["query", "point at the query"], ["key", "at the key"]], state.pointing, (value) => {
      state.pointing = value;
      check(pointing, value);
    });
    setFace(state.face);
    stage.addEventListener("pointermove", point);
    stage.addEventListener("pointerdown", point);
    stage.addEventListener("keydown", keys);
  }

  function setTokens() {
    const options = data.special.map((name, index) => [String(index), name]);
    segment(tokens, [...options, ["patch", "patch"]], "", (value) => {
      if (value === "patch") setToken(state.patch ?? centre());
      else setToken({ special: Number(value) });
    });
  }

  const centre = () => ({ row: data.grid[0] >> 1, column: data.grid[1] >> 1 });

  // ---- what a reader does -------------------------------------------------------------------------------------------------
  async function choose(index) {
    state.image = index;
    const image = data.images[index];
    check(images, String(index));
    const picture = new Image();
    picture.src = image.picture;
    try {
      await picture.decode();
      if (!decoded.has(index)) decoded.set(index, await unpack(image));
    } catch (error) {
      root.prepend(make("p", { class: "ex-note ex-problem", role: "alert", text: typeof DecompressionStream === "undefined"
        ? "This browser cannot unpack the weights; one of 2023 or later can."
        : `The weights of ${image.name} cannot be read (${error.name}).` }));
      return;
    }
    if (state.image !== index) return; // another one was chosen meanwhile
    weights = decoded.get(index);
    if (image.rollout) unpackRollout(image.rollout);
    stage.width = 448;
    stage.height = Math.max(1, Math.min(1792, Math.round((448 * image.height) / image.width)));
    stage.style.setProperty("--ratio", stage.width / stage.height);
    grey = bothTones(picture);
    const options = [];
    if (weights && weights.byHead) options.push(["head", "one head"]);
    if (weights) options.push(["mean", "layer mean"]);
    if (image.rollout) options.push(["rollout", special ? `rollout from ${data.special[0]}` : "rollout"]);
    image.maps.forEach((one, at) => options.push([`map:${at}`, one.name]));
    if (!options.some(([value]) => value === state.view)) state.view = options.length ? options[0][0] : "none";
    segment(views, options, state.view, setView);
    const layers = weights ? weights.layers : image.rollout ? image.rollout.layers : 1;
    layerInput.max = layers - 1;
    state.layer = Math.min(state.layer, layers - 1);
    layerInput.value = state.layer;
    facts.textContent = [image.name, ...image.facts].join(" · ");
    buildBoard();
    later();
  }

  function bothTones(picture) {
    const canvas = make("canvas", { width: stage.width, height: stage.height });
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.imageSmoothingEnabled = picture.naturalWidth > 96;
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const colour = make("canvas", { width: stage.width, height: stage.height });
    colour.getContext("2d").drawImage(canvas, 0, 0);
    const pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < pixels.data.length; at += 4) {
      const light = 0.299 * pixels.data[at] + 0.587 * pixels.data[at + 1] + 0.114 * pixels.data[at + 2];
      pixels.data[at] = pixels.data[at + 1] = pixels.data[at + 2] = light;
    }
    pen.putImageData(pixels, 0, 0);
    return { grey: canvas, colour };
  }

  function setLayer(layer) {
    const last = Number(layerInput.max);
    state.layer = Math.max(0, Math.min(layer, last));
    layerInput.value = state.layer;
    later();
  }

  function setView(view) {
    state.view = view;
    check(views, view);
    later();
  }

  function setTo(to) {
    state.to = to;
    check(directions, to ? "to" : "from");
    later();
  }

  function setToken(token) {
    state.token = token;
    if (token.special === undefined) state.patch = token;
    later();
  }

  function setKey(token) {
    state.key = token;
    later();
  }

  function setFace(face) {
    state.face = face;
    check(faces, face);
    root.dataset.face = face;
    boardFace.hidden = face !== "board";
    space.element.hidden = face !== "space";
    pairs.element.hidden = keyControls.hidden = face !== "pair";
    if (face === "pair" && weights && weights.byHead) {
      setTo(false);
      setView("head");
    }
    if (stage.width && state.token) later();
  }

  function setBoard(value) {
    state.board = value;
    later();
  }

  function setHead(layer, head, { focus = false } = {}) {
    if (!weights) return;
    state.head = (head + weights.heads) % weights.heads;
    setLayer((layer + weights.layers) % weights.layers);
    if (weights.byHead) setView("head");
    if (focus) cells[state.layer * weights.heads + state.head].button.focus();
  }

  // a map of the view in space: of a head, or of a layer
  function chooseMap(layer, head) {
    if (state.view === "rollout" || state.view === "mean") setLayer(layer);
    else setHead(layer, head);
  }

  function toggle() {
    if (playing !== null) {
      clearInterval(playing);
      playing = null;
    } else {
      if (state.layer === Number(layerInput.max)) setLayer(0);
      playing = setInterval(() => {
        if (state.layer === Number(layerInput.max)) toggle();
        else setLayer(state.layer + 1);
      }, 600);
    }
    play.textContent = playing === null ? "▶ Play layers" : "❚❚ Pause";
  }

  function point(event) {
    const box = stage.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * data.grid[0]);
    const column = Math.floor(((event.clientX - box.left) / box.width) * data.grid[1]);
    if (row < 0 || column < 0 || row >= data.grid[0] || column >= data.grid[1]) return;
    const isKey = state.face === "pair" && state.pointing === "key";
    const now = isKey ? state.key : state.token;
    if (now && now.row === row && now.column === column) return;
    if (isKey) setKey({ row, column });
    else setToken({ row, column });
  }

  function keys(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (moves) {
      const from = state.token.special === undefined ? state.token : state.patch ?? centre();
      setToken({ row: Math.max(0, Math.min(data.grid[0] - 1, from.row + moves[0])),
        column: Math.max(0, Math.min(data.grid[1] - 1, from.column + moves[1])) });
    } else if (event.key === "[") setLayer(state.layer - 1);
    else if (event.key === "]") setLayer(state.layer + 1);
    else if (event.key === "x" && state.face !== "pair") setTo(!state.to);
    else return;
    event.preventDefault();
  }

  function boardKeys(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    setHead(state.layer + move[0], state.head + move[1], { focus: true });
  }

  // ---- drawing ------------------------------------------------------------------------------------------------------------
  function buildBoard() {
    cells.length = 0;
    board.replaceChildren();
    board.hidden = !weights;
    if (!weights) return;
    board.style.setProperty("--heads", weights.heads);
    const headings = ["", ...Array.from({ length: weights.heads }, (_, head) => weights.byHead ? `H${head}` : "mean")];
    board.append(make("div", { role: "row" }, ...headings.map((text) => make("span", { role: "columnheader", text }))));
    for (let layer = 0; layer < weights.layers; layer++) {
      const row = make("div", { role: "row" }, make("span", { role: "rowheader", text: `L${numberOf(layer)}` }));
      for (let head = 0; head < weights.heads; head++) {
        const canvas = make("canvas", { "aria-hidden": "true" });
        const words = make("span", { class: "ex-words" });
        const button = make("button", { type: "button", role: "gridcell", tabindex: -1, title: title(layer, head),
          "aria-label": title(layer, head), onclick: () => setHead(layer, head), onkeydown: boardKeys }, canvas, words);
        cells.push({ layer, head, button, canvas, words });
        row.append(button);
      }
      board.append(row);
    }
  }

  const labelOf = (layer, head) => (data.labels[layer] || [])[head] || "";
  const importanceOf = (layer, head) => (data.importance && data.importance[layer] ? data.importance[layer][head] : null);

  function title(layer, head) {
    if (!weights || !weights.byHead) return `layer ${numberOf(layer)}, mean of its heads`;
    const parts = [`L${numberOf(layer)}.H${head}`];
    const words = (data.words[layer] || [])[head] || labelOf(layer, head);
    if (words) parts.push(words);
    const importance = importanceOf(layer, head);
    if (importance !== null && importance !== undefined) parts.push(`importance ${number(importance)} nats`);
    return parts.join(" · ");
  }

  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }

  function draw() {
    const shown = shownMap();
    const all = weights ? cells.map(({ layer, head }) => mapOf(weights, layer, head, state.token, state.to)) : [];
    const most = all.map((one) => one.values.reduce((best, value) => (value > best ? value : best), 0));
    const shared = state.shared ? Math.max(...most) : null;
    drawBoard(all, most, shared);
    const ofHeads = state.view === "head" || state.view === "mean";
    drawStage(shown, shown && ofHeads ? shared : null);
    tokens.hidden = !ofHeads;
    directions.hidden = !ofHeads || state.face === "pair";
    play.disabled = layerInput.disabled = state.view.startsWith("map:");
    layerText.textContent = `${numberOf(state.layer)} (of ${numbersText()})`;
    headField.hidden = headText.hidden = !weights || !weights.byHead;
    headInput.max = weights ? weights.heads - 1 : 0;
    headInput.value = state.head;
    headText.textContent = `${state.head} (of 0 to ${headInput.max})`;
    check(tokens, state.token.special === undefined ? "patch" : String(state.token.special));
    queryField.hidden = queryText.hidden = !ofHeads;
    queryField.firstChild.textContent = state.to ? "Key" : "Query";
    queryInput.value = numberOfToken(state.token);
    queryText.textContent = nameOfToken(state.token);
    linesField.hidden = !ofHeads || state.token.special !== undefined;
    if (state.face === "space") showSpace(all);
    if (state.face === "pair") showPair(shown);
  }

  // all maps in space: those of the board, or the rollouts so far
  function showSpace(all) {
    const image = data.images[state.image];
    const isRollout = state.view === "rollout";
    let maps = cells.map(({ layer, head }, index) => ({ layer, head, ...all[index] }));
    let layers = weights ? weights.layers : 0;
    let heads = weights ? weights.heads : 1;
    let nameOf = title;
    const who = nameOfToken(state.token);
    let subject = state.to ? `Who looks at ${who}` : `Where ${who} looks`;
    if (isRollout || (state.view === "mean" && weights.byHead)) {
      layers = layerCount();
      heads = 1;
      const ofLayer = (layer) => (isRollout ? rolloutOf(image.rollout, layer) : mapOf(weights, layer, null, state.token, state.to));
      maps = Array.from({ length: layers }, (_, layer) => ({ layer, head: 0, ...ofLayer(layer) }));
      nameOf = (layer) => (isRollout ? `rollout up to L${numberOf(layer)}` : `L${numberOf(layer)}, mean of its heads`);
    }
    if (isRollout) subject = "Rollout";
    const grid = maps.length ? maps[0].grid : data.grid;
    space.show({
      maps, layers, heads, grid, nameOf,
      nameOfLayer: (layer) => `L${numberOf(layer)}`,
      nameOfHead: (head) => `H${head}`,
      most: Math.max(0, ...maps.map((map) => greatestOf(map.values))),
      uniform: 1 / (special + data.grid[0] * data.grid[1]),
      unit: isRollout ? "share of rollout" : "share of attention",
      chosen: { layer: state.layer, head: heads === 1 ? 0 : state.head },
      query: isRollout || state.token.special !== undefined || String(grid) !== String(data.grid) ? null : state.token,
      picture: grey.colour, ratio: image.height / image.width, title: subject,
    });
  }

  const layerCount = () => Number(layerInput.max) + 1;

  // the score of the chosen head by dimension; the key of the largest weight unless one was chosen
  function showPair(shown) {
    const image = data.images[state.image];
    const first = weights ? weights.layers - (data.pairs.layers || 0) : 0;
    keyControls.hidden = true;
    if (!image.vectors) {
      pairs.refuse(data.pairs.layers ? `This image has no queries and keys. ${data.pairs.note}` : data.pairs.note);
      return;
    }
    if (state.layer < first) {
      pairs.refuse(`${data.pairs.note} Choose one of the layers ${numberOf(first)} to ${numberOf(weights.layers - 1)}.`);
      return;
    }
    if (state.view !== "head") {
      pairs.refuse("Scores belong to one head: choose the view of one head.");
      return;
    }
    const packed = vectors.get(state.image);
    if (!packed || packed instanceof Promise) {
      if (!packed) loadVectors(state.image, image.vectors);
      pairs.refuse("Queries and keys are being unpacked.");
      return;
    }
    keyControls.hidden = false;
    const layer = state.layer - first;
    const scores = scoresOf(packed, layer, state.head, numberOfToken(state.token));
    const key = state.key ?? strongestKey(scores.weights);
    keyInput.value = numberOfToken(key);
    keyText.textContent = nameOfToken(key);
    const isWhole = [weights.queries, weights.keys].every((grid) => String(grid) === String(data.grid));
    const mapWeights = [...shown.special, ...shown.values];
    pairs.show(pairOf(packed, scores, layer, state.head, numberOfToken(key)), {
      title: `L${numberOf(state.layer)}.H${state.head}, query ${nameOfToken(state.token)}, key ${nameOfToken(key)}`,
      mapWeight: isWhole ? mapWeights[numberOfToken(key)] : null,
      most: greatestOf(mapWeights),
      notes: data.pairs.note,
    });
  }

  function strongestKey(weightsOfKeys) {
    const ofPatches = weightsOfKeys.slice(special);
    return tokenAt(special + ofPatches.indexOf(greatestOf(ofPatches)));
  }

  function loadVectors(index, block) {
    const promise = unpackVectors(block, data.pairs);
    vectors.set(index, promise);
    promise.then((packed) => {
      vectors.set(index, packed);
      later();
    });
  }

  function range(shown, shared) {
    if (shown.low !== undefined) {
      if (shown.low >= 0) return [shown.low, shown.high, amount];
      const side = Math.max(-shown.low, shown.high);
      return [-side, side, signed];
    }
    const most = shown.values.reduce((best, value) => (value > best ? value : best), 0);
    return [0, shared ?? most, amount];
  }

  function drawStage(shown, shared) {
    const pen = stage.getContext("2d"), { width, height } = stage;
    pen.drawImage(state.opacity > 0 && shown ? grey.grey : grey.colour, 0, 0);
    if (shown) {
      const [low, high, colours] = range(shown, shared);
      const [rows, columns] = shown.grid;
      for (let row = 0; row < rows; row++) {
        const top = Math.round((row * height) / rows), bottom = Math.round(((row + 1) * height) / rows);
        for (let column = 0; column < columns; column++) {
          const left = Math.round((column * width) / columns), right = Math.round(((column + 1) * width) / columns);
          const at = 3 * level(shown.values[row * columns + column], low, high);
          pen.fillStyle = `rgba(${colours[at]},${colours[at + 1]},${colours[at + 2]},${state.opacity})`;
          pen.fillRect(left, top, right - left, bottom - top);
        }
      }
      drawScale(low, high, colours, shown);
    }
    const isPatch = state.token.special === undefined && (state.view === "head" || state.view === "mean");
    if (isPatch) {
      if (state.lines && shown) drawLines(pen, shown);
      outline(pen, state.token, "#fff");
    }
    if (state.face === "pair" && state.key && state.key.special === undefined) outline(pen, state.key, "#ffb000");
    say(shown);
  }

  function outline(pen, token, colour) {
    const [rows, columns] = data.grid;
    const { width, height } = stage;
    const box = [(token.column * width) / columns, (token.row * height) / rows, width / columns, height / rows];
    pen.lineWidth = 4;
    pen.strokeStyle = "#000";
    pen.strokeRect(...box);
    pen.lineWidth = 2;
    pen.strokeStyle = colour;
    pen.strokeRect(...box);
  }

  // lines from the token to the patches of the largest weights, wider for larger ones
  function drawLines(pen, shown) {
    const centreOf = (row, column, [rows, columns]) =>
      [((column + 0.5) * stage.width) / columns, ((row + 0.5) * stage.height) / rows];
    const from = centreOf(state.token.row, state.token.column, data.grid);
    const largest = [...shown.values.keys()].sort((one, other) => shown.values[other] - shown.values[one]).slice(0, LINES);
    const most = shown.values[largest[0]];
    for (const at of largest) {
      const end = centreOf(Math.floor(at / shown.grid[1]), at % shown.grid[1], shown.grid);
      const width = most > 0 ? (8 * shown.values[at]) / most : 0;
      for (const [colour, extra] of [["#000", 2], ["#fff", 0]]) {
        pen.strokeStyle = colour;
        pen.lineWidth = width + extra;
        pen.beginPath();
        pen.moveTo(...from);
        pen.lineTo(...end);
        if (width >= 0.5) pen.stroke();
      }
    }
  }

  function drawScale(low, high, colours, shown) {
    paintBar(bar, colours);
    const unit = shown.low === undefined ? "share of attention" : "value of the map";
    ticks.replaceChildren(...[low, (low + high) / 2, high].map((value) => make("span", { text: number(value) })));
    ticks.append(make("span", { class: "ex-unit", text: unit }));
    const uniform = 1 / (special + shown.values.length);
    if (shown.low === undefined && !state.to && uniform < high) {
      const mark = make("span", { class: "ex-uniform", title: `a uniform map: ${number(uniform)}` });
      mark.style.left = `${(100 * uniform) / high}%`;
      ticks.append(mark);
    }
  }

  function drawBoard(all, most, shared) {
    const values = cells.map(({ layer, head }) => importanceOf(layer, head));
    const greatest = Math.max(1e-12, ...values.map((value) => Math.abs(value ?? 0)));
    cells.forEach(({ layer, head, button, canvas, words }, index) => {
      const { values: map, grid } = all[index];
      const label = labelOf(layer, head);
      button.classList.toggle("ex-dim", state.label !== "" && label !== state.label);
      const chosen = layer === state.layer && (state.view === "mean" || (state.view === "head" && head === state.head));
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = layer === state.layer && head === Math.min(state.head, weights.heads - 1) ? 0 : -1;
      canvas.hidden = state.board !== "maps";
      words.textContent = "";
      button.style.background = "";
      if (state.board === "maps") thumbnail(canvas, map, grid, shared ?? most[index]);
      else if (state.board === "importance") {
        const value = values[index];
        words.textContent = value === null || value === undefined ? "–" : value.toFixed(3);
        if (value !== null && value !== undefined) button.style.background = mixed(value / greatest);
      } else {
        words.textContent = label || "–";
        button.style.background = label ? hue(labels.indexOf(label)) : "";
      }
    });
    legend.textContent = { maps: "", importance: "Rise of the loss in nats without the head; red: it matters, blue: the " +
      "loss falls without it.", labels: "What each head attends to." }[state.board];
  }

  const mixed = (share) => `color-mix(in srgb, ${share > 0 ? "#d6604d" : "#4393c3"} ${Math.round(Math.abs(share) * 85)}%, transparent)`;
  const hue = (index) => `hsl(${(index * 137.5) % 360} 60% 50% / 0.35)`;

  function thumbnail(canvas, map, grid, high) {
    const [rows, columns] = grid;
    if (canvas.width !== columns || canvas.height !== rows) {
      canvas.width = columns;
      canvas.height = rows;
    }
    const pen = canvas.getContext("2d"), pixels = pen.createImageData(columns, rows);
    for (let at = 0; at < map.length; at++) {
      const colour = 3 * level(map[at], 0, high);
      pixels.data[at * 4] = amount[colour];
      pixels.data[at * 4 + 1] = amount[colour + 1];
      pixels.data[at * 4 + 2] = amount[colour + 2];
      pixels.data[at * 4 + 3] = 255;
    }
    pen.putImageData(pixels, 0, 0);
  }

  // what is shown, in words: for everyone, and for those who cannot see the map
  function say(shown) {
    if (!shown) {
      said.textContent = "No attention weights are kept for this image.";
      shares.replaceChildren();
      return;
    }
    let best = 0;
    shown.values.forEach((value, index) => { if (value > shown.values[best]) best = index; });
    const columns = shown.grid[1];
    const where = `row ${Math.floor(best / columns)}, column ${best % columns}`;
    const greatest = `greatest at ${where}: ${number(shown.values[best])}`;
    let words = greatest;
    if (state.view === "rollout") words = `Rollout up to layer ${numberOf(state.layer)}; ${greatest}`;
    else if (state.view === "head" || state.view === "mean") {
      const who = state.view === "mean" ? `Layer ${numberOf(state.layer)}, mean of its heads` : title(state.layer, state.head);
      const token = state.token.special === undefined
        ? `the patch in row ${state.token.row}, column ${state.token.column}` : data.special[state.token.special];
      words = `${who}: ${state.to ? `who looks at ${token}` : `where ${token} looks`}; ${greatest}`;
    }
    said.textContent = words;
    stage.setAttribute("aria-label", words);
    shares.replaceChildren(...[...shown.special].map((value, index) => {
      const name = data.special[index];
      const text = state.to && state.view !== "rollout" ? `${name} gives it ${number(value)}` : `${name} ${(100 * value).toFixed(1)} %`;
      return make("span", { text });
    }));
    if (shown.special.length && !(state.to && state.view !== "rollout")) {
      const patches = 1 - shown.special.reduce((sum, value) => sum + value, 0); // rows are distributions
      shares.append(make("span", { text: `all patches ${(100 * patches).toFixed(1)} %` }));
    }
  }

  // heads that the page names in a sentence about this model become links to their maps
  function linked() {
    const names = [...document.querySelectorAll("#main strong")].map((strong) =>
      [strong, /^L(\d+)\.H(\d+)$/.exec(strong.textContent)]);
    return names.filter(([strong, found]) =>
      found && positionOf(Number(found[1])) >= 0 && strong.parentElement.textContent.includes(data.model)).map(
      ([strong, [, layer, head]]) => {
        const place = [positionOf(Number(layer)), Number(head)];
        const link = make("a", { href: "#explorer", title: "show its attention in the explorer",
          onclick: () => setHead(...place) });
        strong.replaceWith(link);
        link.append(strong);
        return place;
      });
  }

  // the head that the first sentence names is shown first, else the one that matters most, else one of the last layer
  function start() {
    const [first] = linked();
    if (first) {
      [state.layer, state.head] = first;
      return;
    }
    let most = -Infinity;
    (data.importance || []).forEach((heads, layer) => heads.forEach((value, head) => {
      if (value !== null && value > most) [most, state.layer, state.head] = [value, layer, head];
    }));
    if (most === -Infinity) state.layer = Infinity; // the last, once it is known
  }

  build();
  start();
  state.token = special ? { special: 0 } : centre();
  setTokens();
  choose(0).then(() => requestAnimationFrame(() => {
    performance.mark("vitlens-explorer-ready");
    performance.measure("vitlens-explorer", "vitlens-explorer-start", "vitlens-explorer-ready");
    root.dataset.ready = "true";
  }));
})();
