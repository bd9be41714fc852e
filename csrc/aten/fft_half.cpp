// Fourier transforms of float16 on the cuda substrate. PyTorch's composites accept that dtype only where the device
// type says "cuda" (ATen/native/SpectralOps.cpp, promote_type_fft), although the primitives below them (_fft_r2c,
// _fft_c2c, _fft_c2r) run on this device as they do there. Composites that make a real input complex get it complex;
// the others, which begin with a real-to-complex transform, are written with the primitives here. Other dtypes go to
// the composite.
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/Operators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <numeric>

#include "aten/registration.h"

namespace quartz {
namespace {

using at::Tensor;
using Norm = std::optional<c10::string_view>;

// What the composite does with a real input: the non-redundant half of its spectrum, all of it, or nothing (complex).
enum class Spectrum { kOneSided, kTwoSided, kComplex };

struct Signal {
  std::vector<int64_t> dims;
  c10::SymDimVector sizes;  // of `dims`; -1: as it is
};

Signal signal_of(const Tensor& x, const std::optional<c10::SymInt>& n, int64_t dim) {
  return {{at::maybe_wrap_dim(dim, x.dim())}, {n.value_or(c10::SymInt(-1))}};
}

Signal signal_of(const Tensor& x, at::OptionalSymIntArrayRef s, at::OptionalIntArrayRef dim) {
  Signal signal;
  if (dim) {
    signal.dims = dim->vec();
  } else {  // the last ones
    signal.dims.resize(s ? s->size() : static_cast<size_t>(x.dim()));
    std::iota(signal.dims.begin(), signal.dims.end(), x.dim() - static_cast<int64_t>(signal.dims.size()));
  }
  at::maybe_wrap_dims(signal.dims, x.dim());
  if (s) {
    signal.sizes.assign(s->begin(), s->end());
  } else {
    signal.sizes.assign(signal.dims.size(), c10::SymInt(-1));
  }
  return signal;
}

Tensor cut_or_padded(Tensor x, const Signal& signal) {
  for (size_t i = 0; i < signal.dims.size(); ++i) {
    const auto dim = signal.dims[i];
    const auto& size = signal.sizes[i];
    if (size == -1 || size == x.sym_size(dim)) continue;
    if (size < x.sym_size(dim)) {
      x = x.narrow_symint(dim, 0, size);
    } else {  // pairs of (before, after) from the last dimension backwards
      c10::SymDimVector padding(static_cast<size_t>(2 * (x.dim() - dim)), c10::SymInt(0));
      padding.back() = size - x.sym_size(dim);
      x = at::constant_pad_nd_symint(x, padding);
    }
  }
  return x;
}

// The primitives' numbers for how a transform is scaled: not at all, by 1/sqrt(n), by 1/n.
int64_t scaling(const Norm& norm, bool forward) {
  if (norm == "ortho") return 1;
  return (norm == "forward") == forward ? 2 : 0;
}

// With `out` the result is written there, as the composites do it: the primitives choose its strides.
Tensor real_to_complex(const Tensor& x, const Signal& signal, const Norm& norm, bool one_sided, bool forward,
                       Tensor* out) {
  const auto input = cut_or_padded(x, signal);
  const auto mode = scaling(norm, forward);
  const at::IntArrayRef dims = signal.dims;
  if (forward && out != nullptr) return at::_fft_r2c_out(*out, input, dims, mode, one_sided);
  if (forward) return at::_fft_r2c(input, dims, mode, one_sided);
  // The inverse of a real signal is the conjugate of its transform; further dimensions follow as complex ones.
  if (dims.size() == 1) {
    if (out == nullptr) return at::_fft_r2c(input, dims, mode, one_sided).conj();
    return at::conj_physical_out(*out, at::_fft_r2c_out(*out, input, dims, mode, one_sided));
  }
  const auto last = at::conj_physical(at::_fft_r2c(input, dims.back(), mode, one_sided));
  const auto others = dims.slice(0, dims.size() - 1);
  if (out != nullptr) return at::_fft_c2c_out(*out, last, others, mode, /*forward=*/false);
  return at::_fft_c2c(last, others, mode, /*forward=*/false);
}

template <class Operator, class OutOperator, auto Composite, auto OutComposite, Spectrum kSpectrum, bool kForward,
          class Schema = typename Operator::schema>
struct Transform;

template <class Operator, class OutOperator, auto Composite, auto OutComposite, Spectrum kSpectrum, bool kForward,
          class Size, class Dim>
struct Transform<Operator, OutOperator, Composite, OutComposite, kSpectrum, kForward,
                 Tensor(const Tensor&, Size, Dim, Norm)> {
  static Tensor call(const Tensor& x, Size size, Dim dim, Norm norm) {
    if (x.scalar_type() != at::kHalf) return Composite(x, size, dim, norm);
    if constexpr (kSpectrum == Spectrum::kComplex) {
      return Composite(x.to(at::kComplexHalf), size, dim, norm);
    } else {
      // PyTorch's checks of the arguments, which it makes of float16 on meta tensors too.
      Operator::call(at::empty_like(x, x.options().device(at::kMeta)), size, dim, norm);
      return real_to_complex(x, signal_of(x, size, dim), norm, kSpectrum == Spectrum::kOneSided, kForward, nullptr);
    }
  }

  static Tensor& call_out(const Tensor& x, Size size, Dim dim, Norm norm, Tensor& out) {
    if (x.scalar_type() != at::kHalf) return OutComposite(x, size, dim, norm, out);
    if constexpr (kSpectrum == Spectrum::kComplex) {
      return OutComposite(x.to(at::kComplexHalf), size, dim, norm, out);
    } else {
      auto meta_out = at::empty_like(out, out.options().device(at::kMeta));
      OutOperator::call(at::empty_like(x, x.options().device(at::kMeta)), size, dim, norm, meta_out);
      real_to_complex(x, signal_of(x, size, dim), norm, kSpectrum == Spectrum::kOneSided, kForward, &out);
      return out;
    }
  }
};

#define QUARTZ_FFT(name, spectrum, forward)                                                                    \
  {                                                                                                            \
    using Own = Transform<at::_ops::name, at::_ops::name##_out, &at::compositeimplicitautograd::name##_symint, \
                          &at::compositeimplicitautograd::name##_symint_outf, Spectrum::spectrum, forward>;    \
    library.impl(#name, TORCH_FN(Own::call));                                                                  \
    library.impl(#name ".out", TORCH_FN(Own::call_out));                                                       \
  }

void register_transforms(torch::Library& library) {
  QUARTZ_FFT(fft_fft, kTwoSided, true)
  QUARTZ_FFT(fft_ifft, kTwoSided, false)
  QUARTZ_FFT(fft_rfft, kOneSided, true)
  QUARTZ_FFT(fft_rfft2, kOneSided, true)
  QUARTZ_FFT(fft_rfftn, kOneSided, true)
  QUARTZ_FFT(fft_ihfft, kOneSided, false)
  QUARTZ_FFT(fft_ihfft2, kOneSided, false)
  QUARTZ_FFT(fft_ihfftn, kOneSided, false)
  QUARTZ_FFT(fft_fft2, kComplex, true)
  QUARTZ_FFT(fft_fftn, kComplex, true)
  QUARTZ_FFT(fft_ifft2, kComplex, false)
  QUARTZ_FFT(fft_ifftn, kComplex, false)
  QUARTZ_FFT(fft_irfft, kComplex, false)
  QUARTZ_FFT(fft_irfft2, kComplex, false)
  QUARTZ_FFT(fft_irfftn, kComplex, false)
  QUARTZ_FFT(fft_hfft, kComplex, true)
  QUARTZ_FFT(fft_hfft2, kComplex, true)
  QUARTZ_FFT(fft_hfftn, kComplex, true)
}

}  // namespace

// Composites are differentiated through what they call: the same functions serve with autograd and without.
void register_fft_half(torch::Library& library) {
  register_transforms(permanent_library("aten", c10::DispatchKey::AutogradPrivateUse1));
  register_transforms(library);
}

}  // namespace quartz
