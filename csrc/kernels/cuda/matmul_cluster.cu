#include "kernels/cuda/matmul_cluster.cuh"

#include "kernels/cuda/matmul_kernels.h"

namespace quartz::kernels::cuda {
namespace {

template <class T>
void cluster(const Matmul& a) {
  if (a.n <= 4224) return run_cluster<ClusterTile<T, 1, 64, 7, 2, 1, 2>>(a);
  run_cluster<ClusterTile<T, 1, 96, 5, 2, 1, 2>>(a);
}

}  // namespace

void matmul_cluster(const Matmul& a) {
  if (a.dtype == DType::kBFloat16) return cluster<BFloat16>(a);
  cluster<Float16>(a);
}

}  // namespace quartz::kernels::cuda
