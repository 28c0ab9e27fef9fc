/* The floor: the least work with which a client can stamp every streamed event of N concurrent completions.
 *
 * Opens N connections, builds N requests, then at t=0 writes all of them and reads with one epoll loop. Each read is
 * stamped (CLOCK_MONOTONIC) before it is scanned for events; no JSON is parsed, no text is kept. A request must end with
 * "data: [DONE]"; the event before that is the usage event that it asked for and is not counted as a token.
 *
 *   epoll_client PORT REQUESTS INPUT_TOKENS OUTPUT_TOKENS MODEL STAMPS_FILE
 *
 * STAMPS_FILE gets int64 words in the machine's order: for each request  sent_ns, n, and n arrival stamps in ns.
 * Stdout gets one JSON line. Exit 1 when any request failed. Linux, 127.0.0.1 only.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 65536, SILENCE_MS = 60000, SPARE_EVENTS = 8 };

static const char MARK[] = "\ndata: "; /* the byte after it tells '{' from the '[' of [DONE] */
enum { MARK_LENGTH = sizeof MARK - 1 };

typedef struct {
    int fd, matched, events, ended, body_length;
    int64_t sent_ns, *stamps;
    char *body;
} Request;

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "epoll_client: %s: %s\n", what, strerror(errno));
    exit(2);
}

/* The request as bytes, ready to be written: head and body with INPUT_TOKENS random token ids. */
static void build(Request *request, int id, int port, int input_tokens, int output_tokens, const char *model) {
    size_t room = 512 + strlen(model) + (size_t)input_tokens * 5;
    char *body = malloc(room), *text = malloc(room + 512);
    if (!body || !text) die("malloc");
    int n = sprintf(body, "{\"model\":\"%s\",\"prompt\":[", model);
    for (int i = 0; i < input_tokens; i++) n += sprintf(body + n, i ? ",%d" : "%d", 10 + rand() % 4000);
    n += sprintf(body + n,
                 "],\"max_tokens\":%d,\"ignore_eos\":true,\"temperature\":0,\"stream\":true,"
                 "\"stream_options\":{\"include_usage\":true}}",
                 output_tokens);
    request->body_length = sprintf(text,
                                   "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                                   "X-Request-Id: floor-%d\r\nContent-Length: %d\r\n\r\n%s",
                                   port, id, n, body);
    request->body = text;
    request->stamps = malloc(sizeof(int64_t) * (size_t)(output_tokens + SPARE_EVENTS));
    if (!request->stamps) die("malloc");
    free(body);
}

static int open_connection(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (fd < 0) die("socket");
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Counts the events that begin in this read; a mark may be split over reads anywhere. */
static void scan(Request *request, const char *at, const char *end, int64_t now, int capacity) {
    while (at < end) {
        if (request->matched == 0) {
            at = memchr(at, '\n', (size_t)(end - at));
            if (!at) return;
        }
        if (request->matched == MARK_LENGTH) {
            if (*at == '[')
                request->ended = 1;
            else if (request->events < capacity)
                request->stamps[request->events++] = now;
            request->matched = 0;
        } else if (*at == MARK[request->matched]) {
            request->matched++;
            at++;
        } else {
            request->matched = *at == '\n';
            at++;
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: epoll_client PORT REQUESTS INPUT_TOKENS OUTPUT_TOKENS MODEL STAMPS_FILE\n");
        return 2;
    }
    int port = atoi(argv[1]), count = atoi(argv[2]), input_tokens = atoi(argv[3]), output_tokens = atoi(argv[4]);
    FILE *out = fopen(argv[6], "wb");
    if (!out) die(argv[6]);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);

    Request *requests = calloc((size_t)count, sizeof *requests);
    struct epoll_event *ready = malloc(sizeof *ready * (size_t)count);
    char *buffer = malloc(READ_BYTES);
    int poll = epoll_create1(0);
    if (!requests || !ready || !buffer || poll < 0) die("setup");
    for (int i = 0; i < count; i++) {
        build(&requests[i], i, port, input_tokens, output_tokens, argv[5]);
        requests[i].fd = open_connection(port);
        struct epoll_event interest = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, requests[i].fd, &interest)) die("epoll_ctl");
    }

    int64_t cpu_before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < count; i++) {
        requests[i].sent_ns = clock_ns(CLOCK_MONOTONIC);
        if (write(requests[i].fd, requests[i].body, (size_t)requests[i].body_length) != requests[i].body_length) die("write");
    }
    int open = count, failed = 0;
    while (open > 0) {
        int n = epoll_wait(poll, ready, count, SILENCE_MS);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) die("nothing arrived");
        for (int k = 0; k < n; k++) {
            Request *request = &requests[ready[k].data.u32];
            ssize_t size = read(request->fd, buffer, READ_BYTES);
            int64_t now = clock_ns(CLOCK_MONOTONIC);
            if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (size > 0) scan(request, buffer, buffer + size, now, output_tokens + SPARE_EVENTS);
            if (size > 0 && !request->ended) continue;
            failed += request->events != output_tokens + 1 || !request->ended;
            close(request->fd);
            open--;
        }
    }
    int64_t cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_before, tokens = 0;

    for (int i = 0; i < count; i++) {
        int64_t n = requests[i].events > 0 ? requests[i].events - 1 : 0; /* the last one carried the usage */
        tokens += n;
        fwrite(&requests[i].sent_ns, sizeof(int64_t), 1, out);
        fwrite(&n, sizeof n, 1, out);
        fwrite(requests[i].stamps, sizeof(int64_t), (size_t)n, out);
    }
    if (fclose(out)) die(argv[6]);
    printf("{\"requests\": %d, \"failed\": %d, \"tokens\": %lld, \"cpu_us_per_token\": %.3f}\n", count, failed,
           (long long)tokens, tokens ? (double)cpu_ns / 1e3 / (double)tokens : 0.0);
    return failed > 0;
}
