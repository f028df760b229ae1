// What ffcv needs of OpenCV, so that its wheel needs no other library. Nothing here calls its resize.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

constexpr int CV_8UC3 = 16;

namespace cv {
constexpr int INTER_AREA = 3;

struct Size {
    int width, height;
};

struct Mat {  // bytes of three channels, which others own
    int rows, cols;
    uint8_t* data;
    size_t step;
    Mat(int rows, int cols, int, void* data) : rows(rows), cols(cols), data((uint8_t*)data), step(3 * (size_t)cols) {}
    Mat colRange(int from, int to) const { Mat part = *this; part.data += 3 * from; part.cols = to - from; return part; }
    Mat rowRange(int from, int to) const { Mat part = *this; part.data += step * from; part.rows = to - from; return part; }
    Size size() const { return {cols, rows}; }
};

// Each pixel is the mean over its area of the source.
inline void resize(const Mat& from, Mat& to, Size size, double, double, int) {
    double down = (double)from.rows / size.height, across = (double)from.cols / size.width;
    for (int y = 0; y < size.height; y++)
        for (int x = 0; x < size.width; x++)
            for (int channel = 0; channel < 3; channel++) {
                double top = y * down, left = x * across, sum = 0;
                for (int v = (int)top; v < from.rows && v < top + down; v++)
                    for (int u = (int)left; u < from.cols && u < left + across; u++)
                        sum += (std::min(v + 1.0, top + down) - std::max((double)v, top)) *
                               (std::min(u + 1.0, left + across) - std::max((double)u, left)) *
                               from.data[v * from.step + 3 * u + channel];
                to.data[y * to.step + 3 * x + channel] = (uint8_t)(sum / (down * across) + 0.5);
            }
}
}  // namespace cv
