// What the scripts of the attention explorer share: small makers of elements, colours, numbers and packed bytes.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function choice(title, options, chosen, changed) {
  const select = make("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) {
    select.append(make("option", { value, text, selected: value === chosen }));
  }
  return make("label", { class: "ex-field" }, make("span", { text: title }), select);
}

function slider(title, attributes, changed) {
  const input = make("input", { type: "range", ...attributes, oninput: () => changed(Number(input.value)) });
  return [make("label", { class: "ex-field" }, make("span", { text: title }), input), input];
}

// ---- colours: viridis for amounts, blue to red where values are signed ------------------------------------------------
const AMOUNT = ["440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e", "1f988b", "22a884",
  "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"];
const SIGNED = ["2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f7", "fddbc7", "f4a582", "d6604d", "b2182b"];
function table(stops) {
  const colours = stops.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const filled = new Uint8Array(256 * 3);
  for (let index = 0; index < 256; index++) {
    const place = (index / 255) * (colours.length - 1);
    const low = Math.min(Math.floor(place), colours.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      filled[index * 3 + channel] =
        Math.round(colours[low][channel] + (place - low) * (colours[low + 1][channel] - colours[low][channel]));
    }
  }
  return filled;
}
const amount = table(AMOUNT), signed = table(SIGNED);

const level = (value, low, high) =>
  high > low ? Math.max(0, Math.min(255, Math.round(((value - low) / (high - low)) * 255))) : 0;

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.001 && size < 10000 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

function bytesOf(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return bytes;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function paintBar(bar, colours) {
  const pen = bar.getContext("2d");
  const line = pen.createImageData(256, 1);
  for (let at = 0; at < 256; at++) {
    line.data.set([colours[at * 3], colours[at * 3 + 1], colours[at * 3 + 2], 255], at * 4);
  }
  pen.putImageData(line, 0, 0);
}

const greatestOf = (values) => values.reduce((most, value) => (value > most ? value : most), 0);
