// What happens in a process of its own: environment variables, and tensors that live until the very end. The binary
// starts itself again with --child=NAME and looks at what that prints and how it ends.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <thread>

#include "aten/registration.h"
#include "common.h"
#include "runtime/environment.h"
#include "runtime/generator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

struct Ended {
  int status;  // of waitpid
  std::string output;
};

Ended run_child(const std::string& name, const std::map<std::string, std::string>& variables) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return {-1, "no pipe"};
  const auto child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    unsetenv("TORCH_QUARTZ_SUBSTRATE");
    unsetenv("TORCH_QUARTZ_HOST_DEVICES");
    for (const auto& [key, value] : variables) setenv(key.c_str(), value.c_str(), 1);
    const std::string argument = "--child=" + name;
    execl("/proc/self/exe", "test_process", argument.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  Ended ended{-1, ""};
  std::array<char, 4096> buffer;
  for (ssize_t got = 0; (got = read(ends[0], buffer.data(), buffer.size())) > 0;)
    ended.output.append(buffer.data(), got);
  close(ends[0]);
  waitpid(child, &ended.status, 0);
  return ended;
}

void expect_output(const std::string& name, const std::map<std::string, std::string>& variables,
                   const std::string& part) {
  const auto ended = run_child(name, variables);
  EXPECT_TRUE(WIFEXITED(ended.status) && WEXITSTATUS(ended.status) == 0)
      << name << " ended with status " << ended.status << ": " << ended.output;
  EXPECT_TRUE(contains(ended.output, part));
}

// ---- what a child does
// ------------------------------------------------------------------------------------------------

// An error at load must not end the process: initialize() throws it again, and a second call does so once more.
void child_initialize() {
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      initialize();
      std::cout << "substrate " << substrate().name() << ", devices " << static_cast<int>(device_count()) << ": "
                << substrate_reason() << "\n";
    } catch (const c10::ValueError& error) {
      std::cout << "ValueError: " << error.what_without_backtrace() << "\n";
    } catch (const c10::Error& error) {
      std::cout << "Error: " << error.what_without_backtrace() << "\n";
    }
  }
}

void child_devices() {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    std::cout << "device " << static_cast<int>(i) << (still_works(i) ? " works\n" : " does not work\n");
  }
}

at::Tensor& kept_to_the_end() {
  static at::Tensor tensor;
  return tensor;
}

at::Tensor& kept_by_thread() {
  thread_local at::Tensor tensor;
  return tensor;
}

// Static destructors and threads that have not ended free quartz memory after main.
void child_exit() {
  kept_to_the_end() = on_quartz({1, 2, 3}).view({3, 1}).requires_grad_();
  kept_to_the_end().mul(2).sum().backward();
  static auto generator = new_generator(0);
  kept_by_thread() = on_quartz({4});
  std::thread([] { kept_by_thread() = on_quartz({5}); }).join();
  std::cout << "leaving main with " << values_of(kept_to_the_end().grad())[2] << "\n";
}

void child_fork() {
  const auto x = on_quartz({1, 2});
  const auto child = fork();
  if (child == 0) _exit(values_of(x.add(x)) == std::vector<double>{2, 4} ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  std::cout << "the forked process ended with " << status << "\n";
}

const std::map<std::string, std::function<void()>> kChildren{
    {"initialize", child_initialize}, {"devices", child_devices}, {"exit", child_exit}, {"fork", child_fork}};

// ---- the tests
// --------------------------------------------------------------------------------------------------------

TEST(EnvironmentVariables, Substrate) {
  expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "host"}},
                "substrate host, devices 1: TORCH_QUARTZ_SUBSTRATE=host asks for it");
  expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", ""}}, "substrate ");  // empty is unset
  expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "gpu"}},
                "ValueError: quartz: TORCH_QUARTZ_SUBSTRATE must be 'host' or 'cuda', got 'gpu'");
}

TEST(EnvironmentVariables, ErrorsAreRepeatedAndNotFatal) {
  const auto ended = run_child("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "GPU"}});
  EXPECT_EQ(ended.status, 0) << ended.output;
  const auto first = ended.output.find("ValueError");
  EXPECT_NE(ended.output.find("ValueError", first + 1), std::string::npos) << ended.output;
}

TEST(EnvironmentVariables, CudaCannotBeForcedWhereThereIsNone) {
  if (substrate().is_cuda()) {
    expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "cuda"}}, "substrate cuda");
    expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "cuda"}, {"CUDA_VISIBLE_DEVICES", ""}},
                  "Error: quartz: TORCH_QUARTZ_SUBSTRATE=cuda, but ");
    return;
  }
  expect_output("initialize", {{"TORCH_QUARTZ_SUBSTRATE", "cuda"}}, "Error: quartz: TORCH_QUARTZ_SUBSTRATE=cuda, but ");
  expect_output("initialize", {}, "substrate host, devices 1: ");  // without force: the host
}

TEST(EnvironmentVariables, HostDevices) {
  const auto host = [](const char* count) {
    return std::map<std::string, std::string>{{"TORCH_QUARTZ_SUBSTRATE", "host"}, {"TORCH_QUARTZ_HOST_DEVICES", count}};
  };
  expect_output("initialize", host("2"), "substrate host, devices 2");
  expect_output("initialize", host(""), "substrate host, devices 1");
  expect_output("devices", host("16"), "device 15 works");
  for (const char* wrong : {"0", "17", "-1", "two", "2x", "1.5", "99999999999999999999"}) {
    expect_output("initialize", host(wrong),
                  "ValueError: quartz: TORCH_QUARTZ_HOST_DEVICES must be an integer from 1 to 16, got '" +
                      std::string(wrong) + "'");
  }
}

TEST(ProgramLife, EndsCleanlyWithLiveTensors) { expect_output("exit", {}, "leaving main with 2\n"); }

TEST(ProgramLife, HostMemoryWorksInAForkedProcess) {
  expect_output("fork", {{"TORCH_QUARTZ_SUBSTRATE", "host"}}, "the forked process ended with 0\n");
}

}  // namespace
}  // namespace quartz::test

int main(int argc, char** argv) {
  const std::string prefix = "--child=";
  if (argc > 1 && std::string(argv[1]).rfind(prefix, 0) == 0) {
    quartz::test::kChildren.at(argv[1] + prefix.size())();
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
