// The live strip. Joined behind charts.js into one module; the kernel's side is feed.py.
//
//   snapshot (trait, read when a page attaches) ─┐
//   messages, numbered ──────────────────────────┴─▶ store ─▶ views, redrawn once a frame
//
// Text from the kernel only ever enters the page as text nodes, never as markup.

const PARTS = ["data", "compute", "wait", "transfer + codec", "optimizer", "other"];
const AT_WORK = ["starting", "running", "recovering"];
const SILENCE_S = 5;
const ACK_S = 3;
const MOST_EVENTS = 200;
const CARD_PX = 250;

// ---- figures ---------------------------------------------------------------------------------

function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || size === 0) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

function percent(share) {
  if (share == null || Number.isNaN(share)) return "–";
  const hundredths = share * 100;
  return `${hundredths >= 10 ? Math.round(hundredths) : Number(hundredths.toPrecision(2))} %`;
}

// Memory is sold in binary units: 1 GiB = 2^30 bytes.
function size(bytes) {
  if (bytes == null) return "–";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(bytes || 1) / 10)));
  const value = bytes / 1024 ** power;
  return `${value.toFixed(value < 10 && power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function sizeOf(used, whole) {
  const [a, b] = [size(used), size(whole)];
  const unit = b.slice(-3);
  return a.endsWith(unit) ? `${a.slice(0, -4)} / ${b}` : `${a} / ${b}`;
}

function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  if (seconds < 60) return `${number(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ---- store -----------------------------------------------------------------------------------

function newStore() {
  return { fleet: [], head: null, events: [], series: new Map(), number: 0, heardAt: 0, steppedAt: 0, ackedAt: 0 };
}

function takeFrame(store, frame, data) {
  if (frame.kind === "snapshot") {
    store.series.clear();
    store.events = [];
    store.fleet = frame.fleet;
  }
  if (store.head?.progress.step !== frame.head.progress.step) store.steppedAt = Date.now();
  if (store.head?.state !== frame.head.state) store.steppedAt = Date.now();
  store.number = frame.number;
  store.head = frame.head;
  takeEvents(store, frame.events);
  takePoints(store, frame, data);
}

// A snapshot may already hold what the next message brings.
function takeEvents(store, events) {
  const known = new Set(store.events.map((event) => JSON.stringify(event)));
  const fresh = events.filter((event) => !known.has(JSON.stringify(event)));
  store.events = store.events.concat(fresh).slice(-MOST_EVENTS);
}

function takePoints(store, { layout, base }, data) {
  let offset = data.byteOffset;
  const column = (count) => {
    const values = new Float32Array(data.buffer.slice(offset, offset + 4 * count));
    offset += 4 * count;
    return values;
  };
  for (const [key, count] of layout) {
    if (!store.series.has(key)) store.series.set(key, { x: [], y: [] });
    const steps = Array.from(column(count), (x) => x + base);
    append(store.series.get(key), steps, column(count));
  }
}

function seriesOf(store, key) {
  return store.series.get(key) ?? { x: [], y: [] };
}

// ---- page ------------------------------------------------------------------------------------

function node(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tint(element, name) {
  element.style.setProperty("--hk-tint", `var(--hk-${name})`);
  return element;
}

function bar() {
  const fill = node("i");
  const element = node("div", "hk-bar", fill);
  return { element, set: (share) => (fill.style.width = `${100 * Math.min(1, share ?? 0)}%`) };
}

function makeHead() {
  const state = node("span", "hk-state"), badge = node("span", "hk-badge", "emulated");
  const total = node("span"), step = node("span"), epoch = node("span"), left = node("span", "hk-unit");
  const done = bar();
  state.setAttribute("role", "status");
  const element = node("div", "hk-head", state, badge,
    node("span", "hk-total", total, node("span", "hk-unit", " samples/s")), step,
    node("span", "hk-epoch", epoch, done.element, left));
  const update = ({ head, fleet, heardAt }) => {
    const { progress: at } = head;
    // A kernel that is gone says nothing: what was seen last must not pass for the present.
    const lost = AT_WORK.includes(head.state) && Date.now() - heardAt > 3e3 * SILENCE_S;
    const word = lost ? "no contact" : head.state;
    setText(state, word);
    state.dataset.state = lost ? "failed" : word;
    badge.hidden = !fleet.some((device) => device.emulated);
    setText(total, number(head.samples_per_s));
    total.parentElement.classList.toggle("hk-idle", !AT_WORK.includes(word));
    setText(step, `step ${at.step.toLocaleString("en")}`);
    const target = at.epochs_target;
    setText(epoch, target ? `epoch ${Math.min(at.epoch + 1, target)} / ${target}` : "epoch –");
    done.set(at.share);
    const rest = lost || at.eta_s == null ? "" : ` · ${duration(at.eta_s)} left`;
    setText(left, percent(at.share) + rest);
  };
  return { element, update };
}

function makeCard(device, rank) {
  const speed = node("span"), alone = node("dd"), batch = node("dd"), memory = node("dd"), amp = node("dd");
  const used = bar();
  const entry = (label, value) => [node("dt", "", label), value];
  const rate = node("div", "hk-speed", speed, node("div", "hk-unit", "samples/s"));
  const element = tint(node("div", "hk-card",
    node("div", "", node("div", "hk-name", device.label), rate),
    node("dl", "", ...entry("compute", alone), ...entry("batch", batch),
      ...entry("precision", amp), ...entry("memory", memory)),
    used.element), `device-${rank % 6}`);
  alone.title = "Samples per second of its own compute, waiting and transfer left out";
  const update = (figures, working, whole) => {
    setText(speed, number(figures.samples_per_s));
    rate.classList.toggle("hk-idle", !working);
    setText(alone, `${number(figures.pace)} /s`);
    const share = whole ? ` (${percent(figures.batch / whole)})` : "";
    setText(batch, figures.batch == null ? "–" : number(figures.batch) + share);
    setText(amp, figures.amp === "off" ? "fp32" : figures.amp ?? "–");
    setText(memory, sizeOf(figures.memory_bytes, device.memory_bytes));
    const known = figures.memory_bytes != null && device.memory_bytes;
    used.set(known ? figures.memory_bytes / device.memory_bytes : 0);
  };
  return { element, update };
}

function makeCards(fleet) {
  const cards = fleet.map(makeCard);
  const element = node("div", "hk-cards", ...cards.map((card) => card.element));
  const update = ({ head }) => {
    const whole = head.devices.reduce((sum, figures) => sum + (figures.batch ?? 0), 0);
    const working = AT_WORK.includes(head.state);
    const rows = Math.ceil(cards.length / Math.max(1, Math.floor(element.clientWidth / CARD_PX)));
    element.style.setProperty("--hk-columns", Math.ceil(cards.length / rows));
    cards.forEach((card, rank) => card.update(head.devices[rank], working, whole));
  };
  return { element, update };
}

function makeSplits(fleet) {
  const keys = PARTS.map((part, i) => tint(node("span", "hk-key", part), `part-${i}`));
  const rows = fleet.map((device) => {
    const parts = PARTS.map((_, i) => tint(node("i"), `part-${i}`));
    const stack = node("div", "hk-stack", ...parts), time = node("span");
    stack.setAttribute("role", "img");
    return { device, parts, stack, time, cells: [node("span", "", device.label), stack, time] };
  });
  const grid = node("div", "hk-splits", ...rows.flatMap((row) => row.cells));
  const element = node("div", "", node("div", "hk-title", "Time in a step", ...keys), grid);
  const update = ({ head }) => {
    const longest = Math.max(...head.devices.map((figures) => figures.step_s ?? 0));
    rows.forEach((row, rank) => updateSplit(row, head.devices[rank], longest));
  };
  return { element, update };
}

function updateSplit(row, figures, longest) {
  setText(row.time, duration(figures.step_s));
  const seconds = figures.parts ?? PARTS.map(() => 0);
  row.parts.forEach((part, i) => {
    const share = longest ? Math.max(0, seconds[i]) / longest : 0;
    part.style.width = `${100 * share}%`;
    part.style.padding = share > 0.04 ? "" : "0";
    part.title = `${PARTS[i]}: ${duration(seconds[i])}`;
    setText(part, share > 0.07 ? percent(seconds[i] / figures.step_s) : "");
  });
  const spoken = PARTS.map((name, i) => `${name} ${figures.parts ? duration(seconds[i]) : "–"}`);
  row.stack.setAttribute("aria-label", `${row.device.label}: ${spoken.join(", ")}`);
}

function makeStatus() {
  const element = node("div", "hk-status");
  const entry = (text, kind = "") => node("span", kind, text);
  const update = ({ head, heardAt, steppedAt }) => {
    const [silent, still] = [heardAt, steppedAt].map((at) => Math.floor((Date.now() - at) / 1e3));
    const entries = head.error ? [entry(head.error, "hk-bad")] : [];
    if (head.status) entries.push(entry(head.status, "hk-bad"));
    if (head.notice) entries.push(entry(head.notice, "hk-warn"));
    for (const { name, requested, applied, effect } of head.pending) {
      entries.push(entry(`requested ${name} ${requested}, now ${applied}, from ${effect}`, "hk-warn"));
    }
    if (AT_WORK.includes(head.state)) {
      const late = silent >= SILENCE_S;
      const text = `last update ${silent} s ago`;
      if (late) entries.push(entry(`${text}: is the kernel alive? If not, run the session's cell again`, "hk-warn"));
      else if (silent > 2) entries.push(entry(text));
    }
    const slow = Math.max(SILENCE_S, 5 * Math.max(...head.devices.map((f) => f.step_s ?? 0)));
    if (head.state === "running" && still > slow) entries.push(entry(`no step for ${still} s`, "hk-warn"));
    element.replaceChildren(...entries);
  };
  return { element, update };
}

function makeTable(fleet) {
  const titles = ["device", "samples/s", "batch", "precision", "memory", ...PARTS.map((p) => `${p} s`)];
  const rows = fleet.map((device) => titles.map((_, i) => node("td", "", i ? "–" : device.label)));
  const table = node("table", "",
    node("thead", "", node("tr", "", ...titles.map((title) => node("th", "", title)))),
    node("tbody", "", ...rows.map((cells) => node("tr", "", ...cells))));
  const guard = node("div", "hk-guard");
  const element = node("details", "hk-table", node("summary", "", "Latest values as a table"), table, guard);
  const update = ({ head }) => {
    rows.forEach((cells, rank) => {
      const f = head.devices[rank];
      const seconds = PARTS.map((_, i) => number(f.parts?.[i]));
      const texts = [number(f.samples_per_s), number(f.batch), f.amp ?? "–", size(f.memory_bytes), ...seconds];
      texts.forEach((text, i) => setText(cells[i + 1], text));
    });
    const { cosine, error } = head.guard ?? {};
    setText(guard, `compressed gradient: cosine ${number(cosine)} to the true one, relative error ${percent(error)}`);
    guard.hidden = !head.guard;
  };
  return { element, update };
}

function makeCharts(store, redraw) {
  const speeds = store.fleet.map((device, rank) => ({ key: `speed:${rank}`, name: device.label, color: `device-${rank % 6}`, width: 1.5 }));
  const all = { key: "speed", name: "all", color: "fg", width: 2 };
  const charts = [
    newChart("Throughput, samples/s", [all, ...speeds], number, true),
    newChart("Loss", [{ key: "loss", name: "loss", color: "fg", width: 1.5 }], number, false),
    newChart("Communication share", [{ key: "comm", name: "share", color: "part-3", width: 1.5 }], percent, true),
  ];
  let hover = null;
  for (const chart of charts) {
    chart.canvas.addEventListener("pointermove", (event) => redraw((hover = stepAt(chart, event))));
    chart.canvas.addEventListener("pointerleave", () => redraw((hover = null)));
  }
  const update = (_, theme) => charts.forEach((chart) => updateChart(chart, store, hover, theme));
  return { element: node("div", "hk-charts", ...charts.map((chart) => chart.element)), update };
}

function newChart(title, lines, format, fromZero) {
  const canvas = node("canvas"), tip = node("div", "hk-tip");
  canvas.setAttribute("role", "img");
  tip.hidden = true;
  const element = node("div", "hk-chart", node("div", "hk-title", title), canvas, tip);
  return { title, lines, format, fromZero, canvas, tip, element };
}

function updateChart(chart, store, hover, theme) {
  chart.series = chart.lines.map((line) => ({ ...line, ...seriesOf(store, line.key), color: theme[line.color] }));
  chart.marks = store.events.filter((event) => !["balance", "epoch", "notice"].includes(event.kind));
  chart.hover = hover;
  drawChart(chart, theme);
  const latest = chart.series.map(({ name, y }) => `${name} ${chart.format(y[y.length - 1])}`);
  chart.canvas.setAttribute("aria-label", `${chart.title}, latest: ${latest.join(", ")}`);
  chart.tip.hidden = hover == null || !chart.span;
  if (chart.tip.hidden) return;
  const near = chart.marks.filter((mark) => Math.abs(mark.step - hover) <= (chart.span.right - chart.span.left) / 60);
  const values = chart.series.filter(({ x }) => x.length)
    .map(({ name, x, y }) => `${name}  ${chart.format(y[nearest(x, hover)])}`);
  setText(chart.tip, [`step ${hover}`, ...values, ...near.map((mark) => mark.text)].join("\n"));
  const right = (hover - chart.span.left) / (chart.span.right - chart.span.left) > 0.5;
  chart.tip.style.left = right ? `${PAD.left + 4}px` : "auto";
  chart.tip.style.right = right ? "auto" : `${PAD.right + 4}px`;
}

function readTheme(root) {
  const light = document.body.dataset.jpThemeLight;
  const night = window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.classList.toggle("hk-dark", light === undefined ? night : light === "false");
  const style = getComputedStyle(root);
  const theme = { font: `11px ${style.fontFamily}` };
  const names = ["fg", "muted", "line", "bad", "mark", "part-3", ...[0, 1, 2, 3, 4, 5].map((i) => `device-${i}`)];
  for (const name of names) theme[name] = style.getPropertyValue(`--hk-${name}`).trim();
  return theme;
}

// ---- widget ----------------------------------------------------------------------------------

function mountView(store, el) {
  const root = node("section", "hetkit-strip");
  root.setAttribute("role", "region");
  el.append(root);
  let parts = [], shownFleet = null, theme = null, asked = false, seen = true;
  const draw = () => {
    asked = false;
    if (!store.head || !seen) return;
    theme ??= readTheme(root);
    if (shownFleet !== store.fleet) {
      shownFleet = store.fleet;
      const emulated = shownFleet.some((device) => device.emulated) ? ", emulated devices" : "";
      root.setAttribute("aria-label", `hetkit live training${emulated}`);
      parts = [makeHead(), makeStatus(), makeCards(shownFleet), makeSplits(shownFleet), makeCharts(store, redraw), makeTable(shownFleet)];
      root.replaceChildren(...parts.map((part) => part.element));
    }
    for (const part of parts) part.update(store, theme);
  };
  const redraw = () => {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  };
  const rethemed = () => redraw((theme = null));
  const themes = new MutationObserver(rethemed);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const sizes = new ResizeObserver(redraw);
  sizes.observe(root);
  // Under load several changes arrive at once: only the last one is the present.
  const sight = new IntersectionObserver((all) => redraw((seen = all.at(-1).isIntersecting)));
  sight.observe(root);
  const clock = setInterval(redraw, 1000);
  redraw();
  const unmount = () => {
    clearInterval(clock);
    for (const observer of [themes, sizes, sight]) observer.disconnect();
  };
  return { redraw, unmount };
}

function createStrip() {
  const store = newStore(), views = new Set();
  const take = (frame, data) => {
    takeFrame(store, frame, data);
    store.heardAt = Date.now();
    for (const view of views) view.redraw();
  };
  const initialize = ({ model }) => {
    const snapshot = model.get("snapshot");
    if (snapshot) take(snapshot, snapshot.data);
    const listen = (frame, [data]) => {
      const missed = frame.kind === "delta" && frame.number !== store.number + 1;
      take(frame, data);
      if (missed || Date.now() - store.ackedAt > 1e3 * ACK_S) {
        store.ackedAt = Date.now();
        model.send({ kind: missed ? "resync" : "ack" });
      }
    };
    model.on("msg:custom", listen);
    return () => model.off("msg:custom", listen);
  };
  const render = ({ el }) => {
    const view = mountView(store, el);
    views.add(view);
    return () => {
      views.delete(view);
      view.unmount();
    };
  };
  return { initialize, render };
}

export default createStrip;
