// A small curve without axes.

export function fit(canvas) {
  const ratio = Math.min(3, devicePixelRatio || 1);
  const width = Math.round(canvas.clientWidth * ratio);
  const height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [context, canvas.clientWidth, canvas.clientHeight];
}

export function spark(canvas, curve, { colour, low, high, fill = false, seconds = null }) {
  const [context, width, height] = fit(canvas);
  context.clearRect(0, 0, width, height);
  const points = [...curve];
  if (points.length < 2 || !width) return;
  const until = points.at(-1)[0];
  // At least and at most so many seconds.
  const since = seconds ? until - Math.min(seconds[1], Math.max(seconds[0], until - points[0][0])) : points[0][0];
  const bottom = low ?? Math.min(...points.map(([, value]) => value));
  const top = Math.max(high ?? Math.max(...points.map(([, value]) => value)), bottom + 1e-9);
  const x = (at) => (width * (at - since)) / Math.max(1e-9, until - since);
  const y = (value) => 1 + (height - 2) * (1 - (Math.min(value, top) - bottom) / (top - bottom));
  context.beginPath();
  for (const [at, value] of points) context.lineTo(x(at), y(value));
  context.strokeStyle = colour;
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  context.stroke();
  if (!fill) return;
  context.lineTo(x(until), height);
  context.lineTo(x(points[0][0]), height);
  context.globalAlpha = 0.13;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}
