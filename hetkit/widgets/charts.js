// Line charts on a canvas: series with gaps, marks at events, one crosshair for all charts.
// Joined with strip.js into one module, so nothing is exported here.

const MOST_POINTS = 2000;
const PAD = { left: 46, right: 10, top: 12, bottom: 20 };

// Halves a series, keeping the lowest and the highest of each four points: peaks stay visible.
function thin(series) {
  const x = [], y = [];
  for (let i = 0; i < series.x.length; i += 4) {
    const end = Math.min(i + 4, series.x.length);
    let low = i, high = i;
    for (let j = i; j < end; j++) {
      if (Number.isNaN(series.y[low]) || series.y[j] < series.y[low]) low = j;
      if (Number.isNaN(series.y[high]) || series.y[j] > series.y[high]) high = j;
    }
    for (const j of low === high ? [low] : [Math.min(low, high), Math.max(low, high)]) {
      x.push(series.x[j]);
      y.push(series.y[j]);
    }
  }
  series.x = x;
  series.y = y;
}

function append(series, xs, ys) {
  let last = series.x.length ? series.x[series.x.length - 1] : -Infinity;
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] <= last) continue; // a snapshot may already hold what the next message brings
    series.x.push(xs[i]);
    series.y.push(ys[i]);
    last = xs[i];
  }
  if (series.x.length > MOST_POINTS) thin(series);
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= rough) ?? 10);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) {
    ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  }
  return ticks;
}

function extent(seriesList, fromZero) {
  let low = fromZero ? 0 : Infinity, high = -Infinity, left = Infinity, right = -Infinity;
  for (const { x, y } of seriesList) {
    for (let i = 0; i < x.length; i++) {
      if (Number.isNaN(y[i])) continue;
      low = Math.min(low, y[i]);
      high = Math.max(high, y[i]);
    }
    if (x.length) {
      left = Math.min(left, x[0]);
      right = Math.max(right, x[x.length - 1]);
    }
  }
  if (!Number.isFinite(high)) return null;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return { left, right: Math.max(right, left + 1), low: fromZero ? 0 : low - room, high: high + room };
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// chart: {canvas, series: [{x, y, color, width}], fromZero, format, marks: [{step, kind}], hover}
function drawChart(chart, theme) {
  const { canvas } = chart;
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = theme.font;
  const span = extent(chart.series, chart.fromZero);
  chart.span = span;
  if (!span) {
    pen.fillStyle = theme.muted;
    pen.textAlign = "center";
    pen.fillText("no reading yet", width / 2, height / 2);
    return;
  }
  const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
  const toX = (v) => box.left + ((v - span.left) / (span.right - span.left)) * (box.right - box.left);
  const toY = (v) => box.bottom - ((v - span.low) / (span.high - span.low)) * (box.bottom - box.top);
  drawAxes(pen, chart, span, box, toX, toY, theme);
  drawMarks(pen, chart.marks, span, box, toX, theme);
  for (const series of chart.series) drawLine(pen, series, toX, toY);
  if (chart.hover != null) drawCrosshair(pen, chart, box, toX, toY, theme);
}

function drawAxes(pen, chart, span, box, toX, toY, theme) {
  pen.lineWidth = 1;
  pen.strokeStyle = theme.line;
  pen.fillStyle = theme.muted;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const tick of niceTicks(span.low, span.high, 4)) {
    const y = Math.round(toY(tick)) + 0.5;
    pen.beginPath();
    pen.moveTo(box.left, y);
    pen.lineTo(box.right, y);
    pen.stroke();
    pen.fillText(chart.format(tick), box.left - 6, y);
  }
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (const tick of niceTicks(span.left, span.right, 5)) {
    if (Number.isInteger(tick)) pen.fillText(tick.toLocaleString("en"), toX(tick), box.bottom + 6);
  }
}

function drawMarks(pen, marks, span, box, toX, theme) {
  for (const mark of marks) {
    if (mark.step < span.left || mark.step > span.right) continue;
    const x = Math.round(toX(mark.step)) + 0.5;
    const color = ["failure", "skip"].includes(mark.kind) ? theme.bad : theme.mark;
    pen.strokeStyle = pen.fillStyle = color;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, box.top);
    pen.lineTo(x, box.bottom);
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    pen.moveTo(x - 4, box.top - 8);
    pen.lineTo(x + 4, box.top - 8);
    pen.lineTo(x, box.top - 1);
    pen.fill();
  }
}

function drawLine(pen, { x, y, color, width }, toX, toY) {
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.beginPath();
  let down = false;
  for (let i = 0; i < x.length; i++) {
    if (Number.isNaN(y[i])) {
      down = false;
    } else if (down) {
      pen.lineTo(toX(x[i]), toY(y[i]));
    } else {
      pen.moveTo(toX(x[i]), toY(y[i]));
      down = true;
    }
  }
  pen.stroke();
  if (x.length === 1) pen.fillRect(toX(x[0]) - 2, toY(y[0]) - 2, 4, 4);
}

function drawCrosshair(pen, chart, box, toX, toY, theme) {
  const x = Math.round(toX(chart.hover)) + 0.5;
  if (x < box.left || x > box.right) return;
  pen.strokeStyle = theme.muted;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x, box.top);
  pen.lineTo(x, box.bottom);
  pen.stroke();
  for (const series of chart.series) {
    if (!series.x.length) continue;
    const i = nearest(series.x, chart.hover);
    if (Number.isNaN(series.y[i])) continue;
    pen.fillStyle = series.color;
    pen.beginPath();
    pen.arc(toX(series.x[i]), toY(series.y[i]), 3, 0, 7);
    pen.fill();
  }
}

// The step under the pointer, or null outside the chart's data.
function stepAt(chart, event) {
  if (!chart.span) return null;
  const box = chart.canvas.getBoundingClientRect();
  const share = (event.clientX - box.left - PAD.left) / (box.width - PAD.left - PAD.right);
  if (share < 0 || share > 1) return null;
  return Math.round(chart.span.left + share * (chart.span.right - chart.span.left));
}
