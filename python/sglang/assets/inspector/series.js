// Numbers over time in rings of fixed size, and their lines.

import { fitCanvas } from "./dom.js";

const FINE = 1200;
const COARSE = 1080;
const COARSE_SECONDS = 10;

class Ring {
  constructor(capacity) {
    this.times = new Float64Array(capacity);
    this.values = new Float64Array(capacity);
    this.size = this.next = 0;
  }

  add(time, value) {
    this.times[this.next] = time;
    this.values[this.next] = value;
    this.next = (this.next + 1) % this.times.length;
    this.size = Math.min(this.size + 1, this.times.length);
  }

  /** The time of the oldest entry. */
  get oldest() {
    return this.times[this.size < this.times.length ? 0 : this.next];
  }

  /** Calls `visit(time, value)` from the oldest to the newest. */
  each(visit) {
    const capacity = this.times.length;
    for (let i = this.size; i > 0; i -= 1) {
      const at = (this.next - i + capacity) % capacity;
      visit(this.times[at], this.values[at]);
    }
  }
}

/** Each snapshot's value for minutes, means of ten seconds for three hours. */
export class Series {
  constructor() {
    this.fine = new Ring(FINE);
    this.coarse = new Ring(COARSE);
    this.bucket = { begin: 0, sum: 0, count: 0 };
  }

  add(time, value) {
    this.fine.add(time, value);
    const { bucket } = this;
    if (time - bucket.begin >= COARSE_SECONDS) {
      if (bucket.count) this.coarse.add(bucket.begin, bucket.sum / bucket.count);
      this.bucket = { begin: time, sum: value, count: 1 };
    } else {
      bucket.sum += value;
      bucket.count += 1;
    }
  }

  /** Draw the last `span` seconds, or what there is of them, from 0 to the largest
   * value. */
  draw(canvas, palette, { now, span }) {
    const context = fitCanvas(canvas);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const isLong = span > 600;
    const ring = isLong ? this.coarse : this.fine;
    const longestGap = isLong ? 4 * COARSE_SECONDS : 5;
    const seconds = Math.min(span, Math.max(now - ring.oldest, isLong ? 600 : 30));
    const points = [];
    let most = 0;
    ring.each((time, value) => {
      if (time < now - seconds) return;
      points.push([time, value]);
      most = Math.max(most, value);
    });
    context.clearRect(0, 0, width, height);
    context.fillStyle = palette.css.line;
    context.fillRect(0, height - 1, width, 1);
    if (points.length < 2) return;
    const at = ([time, value]) => [
      width - ((now - time) / seconds) * width,
      height - 2 - (most ? value / most : 0) * (height - 5),
    ];
    drawLine(context, points, at, { height, longestGap, colour: palette.css.spark });
  }
}

function drawLine(context, points, at, { height, longestGap, colour }) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  let begin = 0;
  const stroke = (end) => {
    context.beginPath();
    for (let i = begin; i < end; i += 1) context.lineTo(...at(points[i]));
    context.stroke();
    context.lineTo(at(points[end - 1])[0], height - 1);
    context.lineTo(at(points[begin])[0], height - 1);
    context.globalAlpha = 0.13;
    context.fill();
    context.globalAlpha = 1;
  };
  // While the page was not looking there is no line.
  for (let i = 1; i < points.length; i += 1) {
    if (points[i][0] - points[i - 1][0] > longestGap) {
      stroke(i);
      begin = i;
    }
  }
  stroke(points.length);
}
