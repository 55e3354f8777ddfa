// Shows plotly figures. plotly.js comes from the kernel as a message, once for each page.

function isDark() {
  return document.body.dataset.jpThemeLight === "false";
}

function loadLibrary(source) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    script.onload = resolve;
    script.onerror = () => reject(new Error("plotly.js could not be loaded"));
    document.head.append(script);
  });
}

function themed(figure) {
  const [text, line] = isDark() ? ["#e0e0e0", "#454545"] : ["#222222", "#dddddd"];
  const layout = { ...figure.layout, autosize: true, font: { ...figure.layout.font, color: text } };
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  for (const key of Object.keys(layout).filter((k) => /^[xy]axis/.test(k))) {
    layout[key] = { gridcolor: line, zerolinecolor: line, linecolor: line, ...layout[key] };
  }
  delete layout.template;
  return { data: figure.data, layout };
}

async function draw(el, figures) {
  el.replaceChildren();
  for (const text of figures) {
    const place = document.createElement("div");
    place.className = "hk-plot";
    place.setAttribute("role", "img");
    const { data, layout } = themed(JSON.parse(text));
    place.setAttribute("aria-label", layout.title?.text ?? "chart");
    el.append(place);
    await globalThis.Plotly.newPlot(place, data, layout, { responsive: true, displaylogo: false });
  }
}

function render({ model, el }) {
  let figures = [];
  const redraw = () => globalThis.Plotly && draw(el, figures);
  const take = async (message) => {
    if (message.kind === "library" && !globalThis.Plotly) await loadLibrary(message.source);
    if (message.kind === "figures") figures = message.figures;
    await redraw();
  };
  model.on("msg:custom", take);
  const themes = new MutationObserver(redraw);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  model.send({ kind: globalThis.Plotly ? "figures" : "library" });
  return () => {
    model.off("msg:custom", take);
    themes.disconnect();
  };
}

export default { render };
