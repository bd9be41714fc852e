// The device from C++, without Python: a small network learns two intertwined spirals on torch::Device("quartz").
//
//   spirals [steps]     exit status 0 when it has learned them, 1 when it has not, 2 for a wrong argument
#include <quartz/aten/registration.h>
#include <quartz/runtime/substrate.h>

#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <string_view>

namespace {

struct Net : torch::nn::Module {
  Net() {
    hidden1 = register_module("hidden1", torch::nn::Linear(2, 48));
    hidden2 = register_module("hidden2", torch::nn::Linear(48, 48));
    output = register_module("output", torch::nn::Linear(48, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(hidden1(x));
    x = torch::tanh(hidden2(x));
    return output(x);
  }
  torch::nn::Linear hidden1{nullptr}, hidden2{nullptr}, output{nullptr};
};

// `count` points of each arm, in the square from -1 to 1, and the arm each belongs to.
std::pair<torch::Tensor, torch::Tensor> spirals(int64_t count, torch::Device device) {
  const auto options = torch::TensorOptions().device(device);
  const auto radius = torch::rand({2 * count}, options).sqrt();
  const auto arm = torch::arange(2, options.dtype(torch::kLong)).repeat_interleave(count);
  const auto angle = radius * 6 + arm * M_PI;
  const auto points = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
  return {points + torch::randn_like(points) * 0.01, arm};
}

}  // namespace

int main(int argc, char** argv) {
  int steps = 400;
  if (argc > 1) {
    const std::string_view text = argv[1];
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), steps);
    if (argc > 2 || error != std::errc() || end != text.data() + text.size() || steps < 1) {
      std::cerr << "usage: spirals [steps], where steps is an integer of at least 1\n";
      return 2;
    }
  }
  quartz::initialize();  // loading libquartz.so has registered the device already; this names it to the linker
  const torch::Device device("quartz");
  std::cout << "quartz on " << quartz::substrate().name() << " memory: " << quartz::substrate_reason() << "\n";

  torch::manual_seed(0);
  Net net;
  net.to(device);
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-2));
  const auto [points, arms] = spirals(500, device);
  for (int step = 1; step <= steps; step++) {
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(net.forward(points), arms);
    loss.backward();
    optimizer.step();
    if (step % std::max(1, steps / 4) == 0) std::cout << "step " << step << "  loss " << loss.item<float>() << "\n";
  }

  torch::NoGradGuard no_grad;
  const auto [test_points, test_arms] = spirals(200, device);
  const auto right = net.forward(test_points).argmax(1).eq(test_arms).to(torch::kFloat).mean().item<float>();
  std::cout << "points told apart: " << right * 100 << " % on " << net.parameters()[0].device() << "\n";
  return right > 0.95 ? EXIT_SUCCESS : EXIT_FAILURE;
}
