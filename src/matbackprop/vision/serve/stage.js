// The image with the borders of its regions on a canvas above it; the region under the pointer is outlined.
// value: {photo, alt, width, height, runs: [label, length, ...], names: [...], view, time}
let value = null, labels = null, area = [], under = -1, seen = null, cursor = [0.5, 0.5];
const part = (name) => element.querySelector(name);

function decode() {
  labels = new Uint16Array(value.width * value.height);
  area = new Array(value.names.length).fill(0);
  let at = 0;
  for (let i = 0; i < value.runs.length; i += 2) {
    labels.fill(value.runs[i], at, at + value.runs[i + 1]);
    area[value.runs[i]] += value.runs[i + 1];
    at += value.runs[i + 1];
  }
}

function draw() {
  const canvas = part("canvas");
  if (!canvas || !value) return;
  const { width, height, view } = value;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height), out = image.data;
  const reach = Math.max(1, Math.round(Math.max(width, height) / 400));
  const differs = (p, x, y, r) =>
    (x + r < width && labels[p + r] !== labels[p]) || (y + r < height && labels[p + r * width] !== labels[p]) ||
    (r > 1 && ((x >= r && labels[p - r] !== labels[p]) || (y >= r && labels[p - r * width] !== labels[p])));
  for (let y = 0, p = 0; y < height; y++) for (let x = 0; x < width; x++, p++) {
    const q = 4 * p, label = labels[p], edge = differs(p, x, y, 1);
    if (edge && view === "regions") { out[q] = 255; out[q + 1] = 235; out[q + 2] = 51; out[q + 3] = 255; }
    if (label === under) {
      if (differs(p, x, y, reach + 1) || x < reach || y < reach || x >= width - reach || y >= height - reach) {
        out[q] = 255; out[q + 1] = 90; out[q + 2] = 0; out[q + 3] = 255;
      } else if (!edge && view === "regions") { out[q] = out[q + 1] = out[q + 2] = 255; out[q + 3] = 50; }
    }
  }
  pen.putImageData(image, 0, 0);
  const of = `of ${area.length} region${area.length === 1 ? "" : "s"}`, name = under >= 0 && value.names[under];
  const fraction = under >= 0 ? (100 * area[under] / labels.length).toFixed(1) : 0;
  part(".caption").textContent = under < 0
    ? `${area.length} region${area.length === 1 ? "" : "s"}`
    : `Region ${under + 1} ${of}${name ? `, “${name}”` : ""}: ${fraction} % of the image`;
}

function place(event) {
  const box = part("canvas").getBoundingClientRect(), { width, height } = value;
  const x = Math.floor((event.clientX - box.left) / box.width * width);
  const y = Math.floor((event.clientY - box.top) / box.height * height);
  return x >= 0 && y >= 0 && x < width && y < height ? [x, y] : null;
}

function look(at) {
  seen = at;
  const found = at ? labels[at[1] * value.width + at[0]] : -1;
  if (found !== under) { under = found; draw(); }
}

const choose = (at) => trigger("select", { index: at, value: null });
const inside = (event) => labels && event.target.closest(".picture");
element.addEventListener("pointermove", (event) => { if (inside(event)) look(place(event)); });
element.addEventListener("pointerout", (event) => { if (labels && !event.relatedTarget?.closest?.(".picture")) look(null); });
element.addEventListener("click", (event) => { const at = inside(event) && place(event); if (at) choose(at); });
element.addEventListener("keydown", (event) => {
  if (!inside(event)) return;
  const { width, height } = value, step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const at = () => [Math.floor(cursor[0] * (width - 1)), Math.floor(cursor[1] * (height - 1))];
  if (step) cursor = cursor.map((c, i) => Math.min(1, Math.max(0, c + step[i] * 0.04)));
  else if (event.key === "Enter" || event.key === " ") choose(at());
  else return;
  event.preventDefault();
  look(at());
});
element.addEventListener("focusout", () => labels && look(null));

function show() {
  if (!props.value || props.value.time < value?.time) return; // an older response that arrived late
  value = props.value;
  part(".stage").classList.remove("empty");
  under = -1;
  const photo = part("img");
  if (photo.getAttribute("src") !== value.photo) photo.src = value.photo;
  photo.alt = value.alt;
  part(".picture").style.setProperty("--aspect", value.width / value.height);
  decode();
  if (seen && seen[0] < value.width && seen[1] < value.height) under = labels[seen[1] * value.width + seen[0]];
  draw();
}
watch("value", show);
show();
