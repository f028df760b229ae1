#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
