// The maps of all layers and heads in space: layers along the depth, heads from top to bottom, patches in the plane.
// The projection is parallel: all maps have one size, and a map is a parallelogram, which a canvas draws exactly.

const VIEWS = { oblique: [-42, 12], front: [0, 0], side: [-82, 8] }; // degrees around, and from above
const BETWEEN_HEADS = 0.22; // of the width of a map
const STEP = 5; // degrees that a key turns
const TURNING = 350; // ms from one view to another
const COLOURS = table(AMOUNT.slice(4)); // without the darkest, which a dark page hides
const STILL = 4; // px that a pointer may move in a click
const UNIFORM = 2; // the threshold at first, in multiples of uniform attention

// chosen(layer, head): a map was clicked; moved(layers, heads): a key asks for a neighbour of the chosen map
function makeSpace({ chosen, moved }) {
  const view = { around: VIEWS.oblique[0], above: VIEWS.oblique[1], zoom: 1, spread: 1, threshold: null };
  let scene = null, planes = [], pointed = null, turning = 0, waiting = false;

  const canvas = make("canvas", { class: "ex-space", tabindex: 0, role: "img" });
  const said = make("p", { class: "ex-detail", text: " " });
  const bar = make("canvas", { class: "ex-bar", width: 256, height: 1, "aria-hidden": "true" });
  const ticks = make("div", { class: "ex-marks" });
  const [thresholdField, thresholdInput] = slider("Hide below", { min: 0, max: 1, step: 0.01, value: 0 }, (share) => {
    view.threshold = share;
    repaint();
  });
  const thresholdText = make("output", { class: "ex-value" });
  const [spreadField] = slider("Distance of layers", { min: 0.2, max: 3, step: 0.1, value: 1 }, (spread) => {
    view.spread = spread;
    draw();
  });
  const turns = Object.keys(VIEWS).map((name) => make("button", { type: "button", text: name, onclick: () => turnTo(name) }));
  const zooms = [["−", "smaller", 1 / 1.25], ["+", "larger", 1.25]].map(([text, title, factor]) =>
    make("button", { type: "button", text, title, "aria-label": title, onclick: () => zoomBy(factor) }));
  const element = make("div", { class: "ex-in-space" },
    make("div", { class: "ex-controls" }, make("div", { class: "ex-turns", role: "group", "aria-label": "View from" },
      ...turns, ...zooms), spreadField),
    canvas,
    make("div", { class: "ex-scale" }, bar, ticks),
    make("div", { class: "ex-controls" }, thresholdField, thresholdText),
    said,
    make("p", { class: "ex-hint", text: "Drag, or use the arrow keys, to turn; + and − change the size, 0 returns to the " +
      "first view; [ and ] change the layer, comma and full stop the head. Click a map to choose its head." }));

  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => pointAt(null));
  canvas.addEventListener("keydown", keys);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  paintBar(bar, COLOURS);

  // ---- what is shown ----------------------------------------------------------------------------------------------------
  // scene: maps [{layer, head, values}] over a grid, layers and heads (numbers), names of both, chosen map, picture,
  // ratio (height to width), uniform (a weight), query ({row, column} or null), title
  function show(next) {
    scene = next;
    repaint();
  }

  const most = () => scene.most || 1e-12;
  const leastShown = () => most() * thresholdShare() ** 2; // the slider and the colours follow the square root

  function thresholdShare() {
    if (view.threshold !== null) return view.threshold;
    const share = Math.sqrt((UNIFORM * scene.uniform) / most());
    return share < 0.9 ? share : 0;
  }

  function repaint() {
    if (!scene) return;
    thresholdInput.value = thresholdShare();
    const least = leastShown();
    thresholdText.textContent = `${number(least)} (${number(least / scene.uniform)} × uniform)`;
    planes = scene.maps.map((map) => ({ ...map, texture: textureOf(map.values, least) }));
    const texts = [0, most() / 4, most()].map((value) => make("span", { text: number(value) }));
    ticks.replaceChildren(...texts, make("span", { class: "ex-unit", text: `${scene.unit}; one square-root scale for all maps` }));
    canvas.setAttribute("aria-label", summary());
    pointed = null;
    said.textContent = greatest();
    draw();
  }

  function textureOf(values, least) {
    const [rows, columns] = scene.grid;
    const texture = make("canvas", { width: columns, height: rows });
    const pen = texture.getContext("2d");
    const pixels = pen.createImageData(columns, rows);
    values.forEach((value, at) => {
      if (value < least || value <= 0) return;
      const colour = 3 * level(Math.sqrt(value), 0, Math.sqrt(most()));
      pixels.data.set([COLOURS[colour], COLOURS[colour + 1], COLOURS[colour + 2], 235], 4 * at);
    });
    pen.putImageData(pixels, 0, 0);
    return texture;
  }

  function summary() {
    const layers = `${scene.layers} ${scene.layers === 1 ? "layer" : "layers"}`;
    const heads = scene.heads === 1 ? "" : ` and ${scene.heads} heads`;
    return `${scene.title}: maps of ${layers}${heads} in space. ${greatest()}`;
  }

  function greatest() {
    let best = null;
    for (const map of scene.maps) {
      const value = greatestOf(map.values);
      if (!best || value > best.value) best = { map, value };
    }
    if (!best) return "No attention weights are kept for this image.";
    return `Greatest: ${named(best.map, best.map.values.indexOf(best.value))}.`;
  }

  function named(map, at) {
    const columns = scene.grid[1];
    const value = map.values[at];
    return `${scene.nameOf(map.layer, map.head)}, row ${Math.floor(at / columns)}, column ${at % columns}: ` +
      `${number(value)}, ${number(value / scene.uniform)} × uniform`;
  }

  // ---- the projection ---------------------------------------------------------------------------------------------------
  // layers lie further apart in a model of many heads, so that the whole is about as wide as it is high
  const betweenLayers = () => view.spread * Math.max(0.75, Math.min(1.8, (1.6 * heightOfHeads()) / scene.layers));
  const heightOfHeads = () => scene.heads * (scene.ratio + BETWEEN_HEADS);

  function makeCamera() {
    const around = (view.around * Math.PI) / 180, above = (view.above * Math.PI) / 180;
    const turned = (x, y, z) => {
      const depth = z * Math.cos(around) + x * Math.sin(around);
      return [x * Math.cos(around) - z * Math.sin(around), y * Math.cos(above) - depth * Math.sin(above)];
    };
    const corners = [];
    for (const layer of [-1, scene.layers - 1]) {
      for (const head of [0, scene.heads - 1]) corners.push(...cornersOf(layer, head).map((corner) => turned(...corner)));
    }
    const xs = corners.map(([x]) => x), ys = corners.map(([, y]) => y);
    const box = [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
    const { clientWidth: width, clientHeight: height } = canvas;
    const margin = Math.min(46, 0.12 * width);
    const fitting = Math.min((width - 2 * margin) / (box[2] - box[0]), (height - 2 * margin) / (box[3] - box[1]));
    const scale = fitting * view.zoom;
    const middle = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2];
    if (view.zoom > 1) { // the chosen map moves to the middle
      const centre = turned(...middleOf(scene.chosen.layer, scene.chosen.head));
      const share = 1 - 1 / view.zoom;
      middle.forEach((value, axis) => { middle[axis] = value + share * (centre[axis] - value); });
    }
    const project = (x, y, z) => {
      const [across, down] = turned(x, y, z);
      return [width / 2 + (across - middle[0]) * scale, height / 2 + (down - middle[1]) * scale];
    };
    return { project, isFront: Math.cos(around) * Math.cos(above) >= 0 };
  }

  function placeOf(layer, head) {
    return { top: head * (scene.ratio + BETWEEN_HEADS), depth: layer * betweenLayers() };
  }

  function cornersOf(layer, head) {
    const { top, depth } = placeOf(layer, head);
    return [[0, top, depth], [1, top, depth], [1, top + scene.ratio, depth], [0, top + scene.ratio, depth]];
  }

  function middleOf(layer, head) {
    const { top, depth } = placeOf(layer, head);
    return [0.5, top + scene.ratio / 2, depth];
  }

  // origin, and the sides of a map on the canvas
  function sidesOf(camera, layer, head) {
    const [origin, right, , below] = cornersOf(layer, head).map((corner) => camera.project(...corner));
    return { origin, across: [right[0] - origin[0], right[1] - origin[1]], down: [below[0] - origin[0], below[1] - origin[1]] };
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------------
  function draw() {
    if (!scene || waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (canvas.clientWidth) paint();
    });
  }

  function paint() {
    const density = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * density);
    canvas.height = Math.round(canvas.clientHeight * density);
    if (!planes.length) return;
    const camera = makeCamera();
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const colours = { ink: style.color, line: style.borderTopColor, accent: style.outlineColor, page: style.backgroundColor };
    const far = (layer) => (camera.isFront ? -layer : layer);
    const ordered = [...planes].sort((one, other) => far(one.layer) - far(other.layer));
    for (const plane of [...picturesOf(), ...ordered]) paintPlane(pen, camera, plane, colours, density);
    pen.setTransform(density, 0, 0, density, 0, 0);
    paintNames(pen, camera, colours);
    if (pointed) outlineCell(pen, camera, pointed.plane, pointed.at, colours.ink);
  }

  // the picture before the first layer, once for every head; painted first, so that it hides no map
  function picturesOf() {
    return Array.from({ length: scene.heads }, (_, head) => ({ layer: -1, head, texture: scene.picture, isPicture: true }));
  }

  function paintPlane(pen, camera, plane, colours, density) {
    const { origin, across, down } = sidesOf(camera, plane.layer, plane.head);
    const { width, height } = plane.texture;
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.transform(across[0] / width, across[1] / width, down[0] / height, down[1] / height, origin[0], origin[1]);
    pen.imageSmoothingEnabled = Boolean(plane.isPicture);
    pen.drawImage(plane.texture, 0, 0);
    pen.setTransform(density, 0, 0, density, 0, 0);
    const isChosen = !plane.isPicture && plane.layer === scene.chosen.layer && plane.head === scene.chosen.head;
    outline(pen, camera, plane, isChosen ? colours.accent : colours.line, isChosen ? 2.5 : 1);
    if (scene.query && (isChosen || plane.isPicture)) {
      const at = scene.query.row * scene.grid[1] + scene.query.column;
      outlineCell(pen, camera, plane, at, colours.accent);
    }
  }

  function outline(pen, camera, plane, colour, width) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    for (const corner of cornersOf(plane.layer, plane.head)) pen.lineTo(...camera.project(...corner));
    pen.closePath();
    pen.stroke();
  }

  function outlineCell(pen, camera, plane, at, colour) {
    const [rows, columns] = scene.grid;
    const { origin, across, down } = sidesOf(camera, plane.layer, plane.head);
    const row = Math.floor(at / columns), column = at % columns;
    const corner = (x, y) => [0, 1].map((axis) => origin[axis] + (across[axis] * x) / columns + (down[axis] * y) / rows);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const [x, y] of [[0, 0], [1, 0], [1, 1], [0, 1]]) pen.lineTo(...corner(column + x, row + y));
    pen.closePath();
    pen.stroke();
  }

  // numbers of layers below the lowest heads, of heads at the left, as many as there is room for
  function paintNames(pen, camera, colours) {
    pen.fillStyle = colours.ink;
    pen.strokeStyle = colours.page;
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const below = (layer) => camera.project(0.5, placeOf(0, scene.heads - 1).top + scene.ratio + 0.06, placeOf(layer, 0).depth);
    let last = null;
    for (let layer = 0; layer < scene.layers; layer++) {
      const [x, y] = below(layer);
      if (last && Math.hypot(x - last[0], y - last[1]) < 24) continue;
      paintText(pen, scene.nameOfLayer(layer), x, y + 2);
      last = [x, y];
    }
    if (scene.heads > 1) paintHeads(pen, camera);
  }

  function paintText(pen, text, x, y) {
    pen.strokeText(text, x, y);
    pen.fillText(text, x, y);
  }

  function paintHeads(pen, camera) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    let last = -Infinity;
    for (let head = 0; head < scene.heads; head++) {
      const ends = [-1, scene.layers - 1].flatMap((layer) => cornersOf(layer, head));
      const places = ends.map((corner) => camera.project(...corner));
      const left = Math.min(...places.map(([x]) => x));
      const ys = places.filter(([x]) => x < left + 1).map(([, y]) => y);
      const y = (Math.min(...ys) + Math.max(...ys)) / 2;
      if (Math.abs(y - last) < 14) continue;
      paintText(pen, scene.nameOfHead(head), left - 6, y);
      last = y;
    }
  }

  // ---- pointing, turning, keys --------------------------------------------------------------------------------------------
  // the visible cell that is nearest to the eye, else the cell of the nearest map
  function cellAt(x, y) {
    if (!scene || !planes.length) return null;
    const camera = makeCamera();
    const [rows, columns] = scene.grid;
    const least = leastShown();
    const nearest = [...planes].sort((one, other) => (camera.isFront ? one.layer - other.layer : other.layer - one.layer));
    let hidden = null;
    for (const plane of nearest) {
      const { origin, across, down } = sidesOf(camera, plane.layer, plane.head);
      const area = across[0] * down[1] - across[1] * down[0];
      const offset = [x - origin[0], y - origin[1]];
      const u = (offset[0] * down[1] - offset[1] * down[0]) / area;
      const v = (across[0] * offset[1] - across[1] * offset[0]) / area;
      if (!(u >= 0 && v >= 0 && u < 1 && v < 1)) continue;
      const at = Math.floor(v * rows) * columns + Math.floor(u * columns);
      if (plane.values[at] >= least && plane.values[at] > 0) return { plane, at };
      hidden ??= { plane, at };
    }
    return hidden;
  }

  function pointAt(cell) {
    if (!scene) return;
    pointed = cell;
    said.textContent = cell ? named(cell.plane, cell.at) : greatest();
    draw();
  }

  function placeIn(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function hover(event) {
    if (!event.buttons) pointAt(cellAt(...placeIn(event)));
  }

  function press(event) {
    const start = [event.clientX, event.clientY];
    const from = { around: view.around, above: view.above };
    let isTurn = false;
    stopTurning();
    const drag = (move) => {
      const [right, down] = [move.clientX - start[0], move.clientY - start[1]];
      isTurn ||= Math.hypot(right, down) > STILL;
      if (!isTurn) return;
      setView(from.around + right / 2, from.above + down / 2);
    };
    const release = (up) => {
      canvas.removeEventListener("pointermove", drag);
      canvas.removeEventListener("pointerup", release);
      canvas.removeEventListener("pointercancel", release);
      if (isTurn || up.type === "pointercancel") return;
      const cell = cellAt(...placeIn(up));
      pointAt(cell);
      if (cell) chosen(cell.plane.layer, cell.plane.head);
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointermove", drag);
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
  }

  function setView(around, above) {
    view.around = ((around + 540) % 360) - 180;
    view.above = Math.max(-89, Math.min(89, above));
    draw();
  }

  function stopTurning() {
    cancelAnimationFrame(turning);
  }

  // turn to a named view: at once for readers who want less motion
  function turnTo(name) {
    stopTurning();
    const [around, above] = VIEWS[name];
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      setView(around, above);
      return;
    }
    const from = { around: view.around, above: view.above };
    const began = performance.now();
    const step = (now) => {
      const share = Math.max(0, Math.min(1, (now - began) / TURNING));
      const eased = share * share * (3 - 2 * share);
      setView(from.around + eased * (around - from.around), from.above + eased * (above - from.above));
      if (share < 1) turning = requestAnimationFrame(step);
    };
    turning = requestAnimationFrame(step);
  }

  function zoomBy(factor) {
    view.zoom = Math.max(0.5, Math.min(8, view.zoom * factor));
    draw();
  }

  function reset() {
    view.zoom = 1;
    turnTo("oblique");
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => setView(view.around - STEP, view.above),
      ArrowRight: () => setView(view.around + STEP, view.above),
      ArrowUp: () => setView(view.around, view.above - STEP),
      ArrowDown: () => setView(view.around, view.above + STEP),
      "+": () => zoomBy(1.25), "-": () => zoomBy(1 / 1.25), 0: reset,
      "[": () => moved(-1, 0), "]": () => moved(1, 0), ",": () => moved(0, -1), ".": () => moved(0, 1),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    stopTurning();
    action();
  }

  return { element, show };
}
